"""Every paper that a part or a setting names can be cited."""

import re

import pytest

from apportion.core import parts, update
from apportion.core.catalogue import METHODS
from apportion.core.parts.base import Part
from apportion.core.references import BIBTEX, bibtex, citations, sources

PARTS = {
    cls.__name__: cls.source
    for module in (parts, update)
    for cls in vars(module).values()
    if isinstance(cls, type) and issubclass(cls, Part)
}
YEAR = re.compile(r"(?<!arXiv )\b(?:19|20)\d\d\b")


@pytest.mark.parametrize("source", sorted({*PARTS.values(), *(s for m in METHODS.values() for s in sources(m))}))
def test_every_source_resolves(source):
    assert all(key in BIBTEX for key in citations(source))
    assert len(citations(source)) == len(YEAR.findall(source)), "a year that no citation claims"


def test_every_entry_is_named_somewhere():
    named = {key for s in PARTS.values() for key in citations(s)}
    named |= {key for m in METHODS.values() for s in sources(m) for key in citations(s)}
    assert named == set(BIBTEX)


def test_entries_are_well_formed():
    keys = [re.match(r"@\w+\{(\w+),", entry)[1] for entry in BIBTEX.values()]
    assert len(keys) == len(set(keys))
    for short, entry in BIBTEX.items():
        assert entry.count("{") == entry.count("}")
        assert f"year = {{{short[-4:]}}}" in entry


def test_a_method_cites_what_it_uses():
    text = bibtex([METHODS["rloo"]])
    assert "kool2019buy" in text
    assert "schulman2017ppo" not in text
