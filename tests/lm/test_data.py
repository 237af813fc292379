"""Where prompts come from, in which order, and what the model is given; each refusal one clear line."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apportion.core.errors import ApportionError
from apportion.lm import tiny
from apportion.lm.data import Prompter, dataset, draw

SUMS = "reasoning_gym:chain_sum?min_terms=2&max_terms=2&max_digits=1"


@given(st.integers(1, 20), st.integers(0, 3), st.integers(0, 60), st.integers(0, 30))
def test_the_order_is_one_permutation_an_epoch_wherever_it_is_entered(size, seed, position, count):
    whole = draw(size, seed, 0, position + count)
    assert draw(size, seed, position, count) == whole[position:]
    for epoch in range((position + count) // size):
        assert sorted(whole[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_epochs_and_seeds_differ():
    assert draw(50, 0, 0, 50) != draw(50, 0, 50, 50)
    assert draw(50, 0, 0, 50) != draw(50, 1, 0, 50)


def test_generated_tasks_carry_their_verifier():
    data = dataset(SUMS + "&size=20&seed=3")
    example = data[7]
    assert len(data) == 20
    assert dataset(SUMS + "&size=20&seed=3")[7].prompt == example.prompt
    assert example.columns["verifier"](example.columns["answer"]) == 1.0
    assert example.columns["verifier"]("1000") < 1.0


def test_evaluation_prompts_are_left_out_of_training():
    train, test = dataset(SUMS), dataset(SUMS + "&seed=1000000").first(50)
    rest = train.without(test)
    assert 0 < len(rest) < len(train)
    assert not {e.prompt for e in rest} & {e.prompt for e in test}
    assert rest[5].columns["verifier"](rest[5].columns["answer"]) == 1.0
    with pytest.raises(ApportionError, match="every prompt"):
        test.without(train)


def test_json_lines_and_datasets_give_the_same_rows(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [{"question": f"{i}+1=", "target": str(i + 1)} for i in range(5)]
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    named = dataset(f"{path}?prompt=question&answer=target")
    hub = dataset(f"hf:{tmp_path}?split=train&prompt=question&answer=target")
    ours = dataset([{"prompt": r["question"], "answer": r["target"]} for r in rows])
    theirs = dataset(datasets.Dataset.from_list(rows).rename_column("question", "prompt"))
    for i in range(5):
        assert named[i].prompt == hub[i].prompt == ours[i].prompt == theirs[i].prompt == f"{i}+1="
        assert named[i].columns["answer"] == hub[i].columns["answer"] == ours[i].columns["answer"] == str(i + 1)
        assert theirs[i].columns == {"target": str(i + 1)}


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("nothing.jsonl", "cannot read data nothing.jsonl"),
        ("something", "of no known kind"),
        ("reasoning_gym:chain_sums", "did you mean 'chain_sum'"),
        ("reasoning_gym:chain_sum?min_term=2", "did you mean 'min_terms'"),
        ("reasoning_gym:chain_sum?min_terms=9&max_terms=2", "max_terms must be >= min_terms"),
        ("reasoning_gym:chain_sum?min_terms=two", "reasoning_gym:chain_sum"),
        ("hf:/no/such/folder", "cannot load data 'hf:/no/such/folder'"),
        ([], "has no rows"),
        ([{"question": "1+1="}], "unknown column of the data 'prompt'"),
        ([{"prompt": 3}], "it must be text or a list of messages"),
        ([{"prompt": [{"role": "user"}]}], "it must be text or a list of messages"),
        ({"prompt": "1"}, "data is dict"),
        (3, "data is int"),
    ],
)
def test_data_that_is_none_is_refused(source, says):
    with pytest.raises(ApportionError, match=says) as error:
        dataset(source)
    assert "\n" not in str(error.value)


def test_a_file_without_the_named_column_or_with_a_broken_line_is_refused(tmp_path):
    path = tmp_path / "sums.jsonl"
    path.write_text('{"prompt": "a", "answer": "b"}\n')
    with pytest.raises(ApportionError, match="unknown column 'anwser'; did you mean 'answer'"):
        dataset(f"{path}?answer=anwser")
    with pytest.raises(ApportionError, match=r"unknown column of .* 'promt'; did you mean 'prompt'"):
        dataset(f"{path}?prompt=promt")
    path.write_text('{"prompt": "a"}\n{"prompt":\n')
    with pytest.raises(ApportionError, match="line 2 of"):
        dataset(str(path))


def test_prompts_go_through_the_chat_template():
    words = tiny.tokenizer()
    told = Prompter(words, system="add")
    assert told.text("1+1=") == "<turn>s:add<eos><turn>u:1+1=<eos><turn>a:"
    spoken = [{"role": "system", "content": "no"}, {"role": "user", "content": "2+2="}]
    assert told.text(spoken) == "<turn>s:no<eos><turn>u:2+2=<eos><turn>a:"
    assert words.decode(Prompter(words).ids("1+1=")) == "<turn>u:1+1=<eos><turn>a:"
    assert Prompter(words, plain=True).text("1+1=") == "1+1="


def test_a_model_without_chat_template_takes_text_and_refuses_messages():
    words = tiny.tokenizer()
    words.chat_template = None
    assert words.decode(Prompter(words).ids("1+1=")) == "1+1="
    with pytest.raises(ApportionError, match="no chat template; give prompts as text"):
        Prompter(words).ids([{"role": "user", "content": "1+1="}])
    with pytest.raises(ApportionError, match="a system prompt needs a chat template"):
        Prompter(words, system="add")


def test_a_prompt_longer_than_the_context_is_refused():
    with pytest.raises(ApportionError, match="has 15 tokens; the model's context leaves room for 14"):
        Prompter(tiny.tokenizer(), limit=14).ids("1+1=3+3=")
    with pytest.raises(ApportionError, match="no tokens"):
        Prompter(tiny.tokenizer(), plain=True).ids("")
