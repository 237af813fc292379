"""The papers that parts and settings name, as BibTeX under their short citations ("Shao et al. 2024")."""

from __future__ import annotations

import re
from collections.abc import Iterable

from apportion.core.method import Method

_CITATION = re.compile(r"\b[A-Z][\w-]*(?: et al\.| & [A-Z]\w+)? (?:19|20)\d\d\b")


def _entry(kind: str, key: str, **fields: str) -> str:
    body = "".join(f"  {name} = {{{value}}},\n" for name, value in fields.items())
    return f"@{kind}{{{key},\n{body}}}"


def _arxiv(key: str, author: str, title: str, year: int, number: str) -> str:
    fields = {"author": author, "title": title, "year": str(year), "eprint": number, "archivePrefix": "arXiv"}
    return _entry("misc", key, **fields)


BIBTEX: dict[str, str] = {
    "Agarwal et al. 2024": _arxiv(
        "agarwal2024gkd",
        "Agarwal, Rishabh and Vieillard, Nino and Zhou, Yongchao and others",
        "On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes",
        2024,
        "2306.13649",
    ),
    "Ahmadian et al. 2024": _arxiv(
        "ahmadian2024back",
        "Ahmadian, Arash and Cremer, Chris and Gall{\\'e}, Matthias and others",
        "Back to Basics: Revisiting {REINFORCE}-Style Optimization for Learning from Human Feedback in {LLM}s",
        2024,
        "2402.14740",
    ),
    "Andrychowicz et al. 2021": _arxiv(
        "andrychowicz2021matters",
        "Andrychowicz, Marcin and Raichuk, Anton and Sta{\\'n}czyk, Piotr and others",
        "What Matters for On-Policy Deep Actor-Critic Methods? A Large-Scale Study",
        2021,
        "2006.05990",
    ),
    "Baxter & Bartlett 2001": _entry(
        "article",
        "baxter2001infinite",
        author="Baxter, Jonathan and Bartlett, Peter L.",
        title="Infinite-Horizon Policy-Gradient Estimation",
        journal="Journal of Artificial Intelligence Research",
        volume="15",
        pages="319--350",
        year="2001",
    ),
    "Chen et al. 2025": _arxiv(
        "chen2025gpg",
        "Chen, Junhua and Zhang, Zixi and Zhong, Hantao and Antonova, Rika",
        "Group Policy Gradient",
        2025,
        "2510.03679",
    ),
    "Dong et al. 2023": _arxiv(
        "dong2023raft",
        "Dong, Hanze and Xiong, Wei and Goyal, Deepanshu and others",
        "{RAFT}: Reward rAnked FineTuning for Generative Foundation Model Alignment",
        2023,
        "2304.06767",
    ),
    "Gu et al. 2024": _arxiv(
        "gu2024minillm",
        "Gu, Yuxian and Dong, Li and Wei, Furu and Huang, Minlie",
        "{MiniLLM}: Knowledge Distillation of Large Language Models",
        2024,
        "2306.08543",
    ),
    "Hu 2025": _arxiv(
        "hu2025reinforcepp",
        "Hu, Jian and others",
        "{REINFORCE++}",
        2025,
        "2501.03262",
    ),
    "Kazemnejad et al. 2024": _arxiv(
        "kazemnejad2024vineppo",
        "Kazemnejad, Amirhossein and Aghajohari, Milad and Portelance, Eva and others",
        "{VinePPO}: Unlocking {RL} Potential For {LLM} Reasoning Through Refined Credit Assignment",
        2024,
        "2410.01679",
    ),
    "Khatri et al. 2025": _arxiv(
        "khatri2025scalerl",
        "Khatri, Devvrit and others",
        "The Art of Scaling Reinforcement Learning Compute for {LLM}s",
        2025,
        "2510.13786",
    ),
    "Kingma & Ba 2015": _arxiv(
        "kingma2015adam",
        "Kingma, Diederik P. and Ba, Jimmy",
        "Adam: A Method for Stochastic Optimization",
        2015,
        "1412.6980",
    ),
    "Kool et al. 2019": _entry(
        "inproceedings",
        "kool2019buy",
        author="Kool, Wouter and van Hoof, Herke and Welling, Max",
        title="Buy 4 {REINFORCE} Samples, Get a Baseline for Free!",
        booktitle="ICLR Workshop on Deep Reinforcement Learning Meets Structured Prediction",
        year="2019",
    ),
    "Li et al. 2024": _arxiv(
        "li2024remax",
        "Li, Ziniu and Xu, Tian and Zhang, Yushun and others",
        "{ReMax}: A Simple, Effective, and Efficient Reinforcement Learning Method for Aligning Large Language Models",
        2024,
        "2310.10505",
    ),
    "Liu et al. 2024": _arxiv(
        "liu2024rso",
        "Liu, Tianqi and Zhao, Yao and Joshi, Rishabh and others",
        "Statistical Rejection Sampling Improves Preference Optimization",
        2024,
        "2309.06657",
    ),
    "Liu et al. 2025": _arxiv(
        "liu2025understanding",
        "Liu, Zichen and Chen, Changyu and Li, Wenjun and others",
        "Understanding {R1-Zero}-Like Training: A Critical Perspective",
        2025,
        "2503.20783",
    ),
    "MiniMax-M1 2025": _arxiv(
        "minimax2025m1",
        "{MiniMax}",
        "{MiniMax-M1}: Scaling Test-Time Compute Efficiently with Lightning Attention",
        2025,
        "2506.13585",
    ),
    "Mnih et al. 2016": _arxiv(
        "mnih2016asynchronous",
        "Mnih, Volodymyr and Badia, Adri{\\`a} Puigdom{\\`e}nech and Mirza, Mehdi and others",
        "Asynchronous Methods for Deep Reinforcement Learning",
        2016,
        "1602.01783",
    ),
    "Ouyang et al. 2022": _arxiv(
        "ouyang2022training",
        "Ouyang, Long and Wu, Jeff and Jiang, Xu and others",
        "Training Language Models to Follow Instructions with Human Feedback",
        2022,
        "2203.02155",
    ),
    "Rafailov et al. 2023": _arxiv(
        "rafailov2023direct",
        "Rafailov, Rafael and Sharma, Archit and Mitchell, Eric and others",
        "Direct Preference Optimization: Your Language Model is Secretly a Reward Model",
        2023,
        "2305.18290",
    ),
    "Schulman 2020": _entry(
        "misc",
        "schulman2020kl",
        author="Schulman, John",
        title="Approximating {KL} Divergence",
        howpublished="http://joschu.net/blog/kl-approx.html",
        year="2020",
    ),
    "Schulman et al. 2015": _arxiv(
        "schulman2015trpo",
        "Schulman, John and Levine, Sergey and Moritz, Philipp and Jordan, Michael I. and Abbeel, Pieter",
        "Trust Region Policy Optimization",
        2015,
        "1502.05477",
    ),
    "Schulman et al. 2016": _arxiv(
        "schulman2016gae",
        "Schulman, John and Moritz, Philipp and Levine, Sergey and Jordan, Michael I. and Abbeel, Pieter",
        "High-Dimensional Continuous Control Using Generalized Advantage Estimation",
        2016,
        "1506.02438",
    ),
    "Schulman et al. 2017": _arxiv(
        "schulman2017ppo",
        "Schulman, John and Wolski, Filip and Dhariwal, Prafulla and Radford, Alec and Klimov, Oleg",
        "Proximal Policy Optimization Algorithms",
        2017,
        "1707.06347",
    ),
    "Shao et al. 2024": _arxiv(
        "shao2024deepseekmath",
        "Shao, Zhihong and Wang, Peiyi and Zhu, Qihao and others",
        "{DeepSeekMath}: Pushing the Limits of Mathematical Reasoning in Open Language Models",
        2024,
        "2402.03300",
    ),
    "Stiennon et al. 2020": _arxiv(
        "stiennon2020learning",
        "Stiennon, Nisan and Ouyang, Long and Wu, Jeff and others",
        "Learning to Summarize from Human Feedback",
        2020,
        "2009.01325",
    ),
    "Sutton et al. 2000": _entry(
        "inproceedings",
        "sutton2000policy",
        author="Sutton, Richard S. and McAllester, David and Singh, Satinder and Mansour, Yishay",
        title="Policy Gradient Methods for Reinforcement Learning with Function Approximation",
        booktitle="Advances in Neural Information Processing Systems 12",
        pages="1057--1063",
        year="2000",
    ),
    "Williams 1992": _entry(
        "article",
        "williams1992simple",
        author="Williams, Ronald J.",
        title="Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning",
        journal="Machine Learning",
        volume="8",
        pages="229--256",
        year="1992",
    ),
    "Ye et al. 2020": _arxiv(
        "ye2020mastering",
        "Ye, Deheng and Liu, Zhao and Sun, Mingfei and others",
        "Mastering Complex Control in {MOBA} Games with Deep Reinforcement Learning",
        2020,
        "1912.09729",
    ),
    "Yu et al. 2025": _arxiv(
        "yu2025dapo",
        "Yu, Qiying and Zhang, Zheng and Zhu, Ruofei and others",
        "{DAPO}: An Open-Source {LLM} Reinforcement Learning System at Scale",
        2025,
        "2503.14476",
    ),
    "Zheng et al. 2025": _arxiv(
        "zheng2025gspo",
        "Zheng, Chujie and Liu, Shixuan and Li, Mingze and others",
        "Group Sequence Policy Optimization",
        2025,
        "2507.18071",
    ),
    "Ziegler et al. 2019": _arxiv(
        "ziegler2019finetuning",
        "Ziegler, Daniel M. and Stiennon, Nisan and Wu, Jeffrey and others",
        "Fine-Tuning Language Models from Human Preferences",
        2019,
        "1909.08593",
    ),
}


def citations(source: str) -> list[str]:
    """The short citations in a source, in order.

    >>> citations("Schulman et al. 2017 (PPO), eq. 7; Kingma & Ba 2015")
    ['Schulman et al. 2017', 'Kingma & Ba 2015']
    """
    return _CITATION.findall(source)


def sources(method: Method) -> list[str]:
    """Every source that a method's parts and settings name."""
    parts = [*method.parts.values(), method.sampler.keep, method.update]
    if method.value_loss is not None:
        parts.append(method.value_loss)
    return [*(p.source for p in parts), *(s.source for s in method.settings)]


def bibtex(methods: Iterable[Method]) -> str:
    """BibTeX entries of all papers that the methods name, each once, in the order of their citations."""
    keys = {key for m in methods for source in sources(m) for key in citations(source)}
    return "\n\n".join(BIBTEX[key] for key in sorted(keys))
