"""The family: every method one expression in parts. Values are the papers'; domains tune them by presets.

Where a paper leaves a value open its source says "unstated" and the value is the field's usual one.
"""

from __future__ import annotations

from apportion.core.errors import UnknownName
from apportion.core.method import Claim, Method, Setting
from apportion.core.parts import (
    GAE,
    KL,
    BatchMean,
    BatchStd,
    Cap,
    Clip,
    Constant,
    Critic,
    DecisionMean,
    DecisionRatio,
    Greedy,
    GroupMean,
    GroupStd,
    Imitate,
    KeepBest,
    KeepMixed,
    LeaveOneOut,
    NoBaseline,
    NoScale,
    PairLogistic,
    Process,
    RewardToGo,
    SequenceDecisionRatio,
    SequenceMean,
    SequenceRatio,
    SiblingMean,
    Sum,
    Total,
)
from apportion.core.sampler import Sampler
from apportion.core.update import Adam, NaturalGradient, ValueLoss

BEST_REWARD = "argmax E[R]"
TILTED = "pi* ∝ pi_ref exp(R / beta)"

reinforce = Method(
    name="reinforce",
    title="REINFORCE",
    credit=Total(),
    aggregate=Sum(),
    claim=Claim("unbiased"),
    target=BEST_REWARD,
    lineage="the root: score function times return",
    differs="nothing; the paper's baseline is optional and is left out here",
    settings=(Setting("baseline", 0, "Williams 1992, with b = 0"), Setting("learning rate", 3e-4)),
)

reinforce_togo = Method(
    name="reinforce_togo",
    title="REINFORCE with reward-to-go",
    credit=RewardToGo(),
    aggregate=Sum(),
    claim=Claim("unbiased"),
    target=BEST_REWARD,
    lineage="reinforce + causality",
    differs="nothing",
    settings=(Setting("gamma", 1.0, "Sutton et al. 2000, theorem 1 (undiscounted case)"),),
)

reinforce_batch_mean = Method(
    name="reinforce_batch_mean",
    title="REINFORCE with reward-to-go and the batch mean",
    sampler=Sampler(start="independent"),
    credit=RewardToGo(),
    baseline=BatchMean(),
    aggregate=Sum(),
    claim=Claim("unbiased", given="a large batch"),
    target=BEST_REWARD,
    lineage="reinforce_togo + a constant baseline",
    differs="the baseline is the mean over the collection at hand, not a running average",
    settings=(Setting("baseline", "batch mean", "Williams 1992 (reinforcement comparison)"),),
)

reinforce_pp = Method(
    name="reinforce_pp",
    title="REINFORCE++",
    credit=RewardToGo(),
    scale=BatchStd(ddof=1, eps=1e-8, center=True),
    ratio=DecisionRatio(),
    trust=Clip(0.2, 0.2),
    aggregate=DecisionMean(),
    kl=KL("reward", "k1", beta=0.01),
    claim=Claim("proportional", given="a large batch"),
    target=TILTED,
    lineage="reinforce_togo + PPO's clip + whitening over the batch",
    differs="minibatches are cut after the whitening",
    settings=(
        Setting("A_t", "r - beta sum_{s>=t} KL_s, whitened over the batch", "Hu 2025"),
        Setting("eps", 0.2),
        Setting("beta", 0.01),
    ),
)

reinforce_pp_baseline = reinforce_pp.replace(
    name="reinforce_pp_baseline",
    title="REINFORCE++ with the group's baseline",
    sampler=Sampler(group=8),
    baseline=GroupMean(),
    claim=Claim("proportional", given="a large batch"),
    lineage="reinforce_pp + the group mean",
    settings=(Setting("b", "group mean, then batch whitening", "Hu 2025"), Setting("G", 8)),
)

a2c = Method(
    name="a2c",
    title="A2C (A3C without the asynchrony)",
    sampler=Sampler(start="stream", horizon=5, values="critic"),
    credit=GAE(gamma=0.99, lam=1.0),
    baseline=Critic(),
    aggregate=DecisionMean(),
    value_loss=ValueLoss(0.5),
    entropy=0.01,
    update=Adam(7e-4, max_grad_norm=0.5),
    claim=Claim("biased", given="gamma < 1; at gamma = 1, an exact critic and a large batch it is unbiased"),
    target=BEST_REWARD,
    lineage="reinforce_togo + a learned critic",
    differs="synchronous, and Adam in place of shared RMSProp",
    settings=(
        Setting("t_max", 5, "Mnih et al. 2016, supplement"),
        Setting("entropy", 0.01, "Mnih et al. 2016, supplement"),
        Setting("gamma", 0.99, "Mnih et al. 2016, supplement"),
    ),
)

trpo = Method(
    name="trpo",
    title="TRPO",
    sampler=Sampler(start="stream", horizon=2048, values="critic"),
    credit=GAE(gamma=0.99, lam=0.97),
    baseline=Critic(),
    ratio=DecisionRatio(),
    aggregate=DecisionMean(),
    value_loss=ValueLoss(0.5, learning_rate=1e-3),
    update=NaturalGradient(),
    claim=Claim("biased", given="gamma < 1; at gamma = 1, an exact critic and a large batch it is unbiased"),
    target=BEST_REWARD,
    lineage="natural policy gradient + a KL region with line search",
    differs="GAE in place of the paper's Monte-Carlo returns; the claim is about the gradient before F⁻¹",
    settings=(Setting("delta", 0.01, "Schulman et al. 2015"), Setting("lambda", 0.97)),
)

ppo = Method(
    name="ppo",
    title="PPO",
    sampler=Sampler(start="stream", horizon=2048, values="critic", epochs=10, minibatches=32),
    credit=GAE(gamma=0.99, lam=0.95),
    baseline=Critic(),
    scale=BatchStd(ddof=1, eps=1e-8, center=True),
    ratio=DecisionRatio(),
    trust=Clip(0.2, 0.2),
    aggregate=DecisionMean(),
    value_loss=ValueLoss(0.5),
    update=Adam(3e-4, max_grad_norm=0.5),
    claim=Claim("biased", given="gamma < 1; at gamma = 1, an exact critic and a large batch it is proportional"),
    target=BEST_REWARD,
    lineage="a2c + ratio and clip, so that a collection serves many epochs",
    differs="advantages are whitened once over the collection, not in each minibatch",
    settings=(
        Setting("T", 2048, "Schulman et al. 2017, table 3"),
        Setting("epochs", 10, "Schulman et al. 2017, table 3"),
        Setting("minibatch", 64, "Schulman et al. 2017, table 3"),
        Setting("learning rate", 3e-4, "Schulman et al. 2017, table 3"),
        Setting("gamma, lambda", (0.99, 0.95), "Schulman et al. 2017, table 3"),
        Setting("eps", 0.2, "Schulman et al. 2017, table 1"),
        Setting("max_grad_norm", 0.5),
    ),
)

ppo_rlhf = Method(
    name="ppo_rlhf",
    title="PPO for RLHF",
    sampler=Sampler(values="critic", epochs=4),
    credit=GAE(gamma=1.0, lam=0.95),
    baseline=Critic(),
    scale=BatchStd(ddof=1, eps=1e-8, center=True),
    ratio=DecisionRatio(),
    trust=Clip(0.2, 0.2),
    aggregate=DecisionMean(),
    kl=KL("reward", "k1", beta=0.05),
    value_loss=ValueLoss(0.1, clip=0.2),
    update=Adam(3e-6),
    claim=Claim("proportional", given="an exact critic and a large batch"),
    target=TILTED,
    lineage="ppo + KL in the reward, undiscounted",
    differs="beta is fixed unless KL.adaptive is set",
    settings=(
        Setting("r_t", "-beta log(pi/pi_ref), score at the last token", "Stiennon et al. 2020; Ouyang et al. 2022"),
        Setting("epochs, eps, lambda", (4, 0.2, 0.95), "Ziegler et al. 2019 and its code's defaults"),
        Setting("beta", 0.05),
    ),
)

rloo = Method(
    name="rloo",
    title="RLOO",
    sampler=Sampler(group=4),
    credit=Total(),
    baseline=LeaveOneOut(),
    aggregate=Sum(),
    kl=KL("reward", "k1", beta=0.03),
    update=Adam(1e-6),
    claim=Claim("unbiased"),
    target=TILTED,
    lineage="reinforce + the siblings' mean as baseline",
    differs="nothing; TRL's form has ratio=SequenceRatio(geometric=False), a clip and aggregate=SequenceMean()",
    settings=(
        Setting("k", 4, "Ahmadian et al. 2024, which tries 2 and 4"),
        Setting("beta", 0.03, "Ahmadian et al. 2024, appendix C"),
        Setting("learning rate", 1e-6, "Ahmadian et al. 2024, appendix C"),
    ),
)

remax = Method(
    name="remax",
    title="ReMax",
    sampler=Sampler(greedy=True),
    credit=RewardToGo(),
    baseline=Greedy(),
    aggregate=Sum(),
    update=Adam(1e-6),
    claim=Claim("unbiased"),
    target=BEST_REWARD,
    lineage="reinforce + the greedy rollout as baseline",
    differs="no KL unless kl is set",
    settings=(Setting("b", "R(greedy)", "Li et al. 2024, algorithm 1"), Setting("learning rate", 1e-6)),
)

grpo = Method(
    name="grpo",
    title="GRPO",
    sampler=Sampler(group=64),
    credit=Total(),
    baseline=GroupMean(),
    scale=GroupStd(ddof=0, eps=1e-6),
    ratio=DecisionRatio(),
    trust=Clip(0.2, 0.2),
    aggregate=SequenceMean(),
    kl=KL("loss", "k3", beta=0.04),
    update=Adam(1e-6),
    claim=Claim("biased"),
    target="none in closed form: per prompt arcsin(sqrt p), and k3 in the loss pulls by the forward KL",
    lineage="ppo - critic + the group's mean and spread",
    differs="ddof 0 (the paper says std; TRL and verl take 1) and eps are unstated",
    settings=(
        Setting("G", 64, "Shao et al. 2024, section 4.2"),
        Setting("beta", 0.04, "Shao et al. 2024, section 4.2"),
        Setting("learning rate", 1e-6, "Shao et al. 2024, section 4.2"),
        Setting("eps", 0.2),
        Setting("ddof", 0),
    ),
)

grpo_process = grpo.replace(
    name="grpo_process",
    title="GRPO with process supervision",
    credit=Process(ddof=0, eps=1e-6),
    baseline=NoBaseline(),
    scale=NoScale(),
    claim=Claim("biased"),
    lineage="grpo with a reward for each step",
    settings=(Setting("A_t", "sum of later normalised step rewards", "Shao et al. 2024, section 4.1.3"),),
)

dr_grpo = Method(
    name="dr_grpo",
    title="Dr. GRPO",
    sampler=Sampler(group=8),
    credit=Total(),
    baseline=GroupMean(),
    ratio=DecisionRatio(),
    trust=Clip(0.2, 0.2),
    aggregate=Constant(),
    update=Adam(1e-6),
    claim=Claim("(1-1/G) of the gradient"),
    target=BEST_REWARD,
    lineage="grpo - std - 1/length",
    differs="nothing",
    settings=(
        Setting("G", 8, "Liu et al. 2025, its training script"),
        Setting("normaliser", "the longest response allowed", "Liu et al. 2025, its training script"),
        Setting("learning rate", 1e-6, "Liu et al. 2025, its training script"),
        Setting("beta", 0, "Liu et al. 2025, its training script"),
    ),
)

dapo = Method(
    name="dapo",
    title="DAPO",
    sampler=Sampler(group=16, keep=KeepMixed()),
    credit=Total(),
    baseline=GroupMean(),
    scale=GroupStd(ddof=0, eps=1e-6),
    ratio=DecisionRatio(),
    trust=Clip(0.2, 0.28),
    aggregate=DecisionMean(),
    update=Adam(1e-6),
    claim=Claim("biased"),
    target="argmax of a per-prompt transform of E[R], prompts without signal left out",
    lineage="grpo + clip-higher + token mean + dynamic sampling - KL",
    differs="the token mean is over the batch, as in its code (the paper writes it per group)",
    settings=(
        Setting("eps low, high", (0.2, 0.28), "Yu et al. 2025, section 4.1"),
        Setting("G", 16, "Yu et al. 2025, section 4.1"),
        Setting("keep", "0 < correct < G", "Yu et al. 2025, eq. 11"),
    ),
)

gspo = Method(
    name="gspo",
    title="GSPO",
    sampler=Sampler(group=8, minibatches=4),
    credit=Total(),
    baseline=GroupMean(),
    scale=GroupStd(ddof=0, eps=1e-6),
    ratio=SequenceRatio(geometric=True),
    trust=Clip(3e-4, 4e-4),
    aggregate=SequenceMean(),
    update=Adam(1e-6),
    claim=Claim("biased"),
    target="as grpo without KL: per prompt arcsin(sqrt p)",
    lineage="grpo with one ratio a sequence",
    differs="nothing",
    settings=(
        Setting("eps low, high", (3e-4, 4e-4), "Zheng et al. 2025, section 5.1"),
        Setting("minibatches", 4, "Zheng et al. 2025, section 5.1"),
        Setting("G", 8),
    ),
)

gspo_token = gspo.replace(
    name="gspo_token",
    title="GSPO-token",
    ratio=SequenceDecisionRatio(),
    claim=Claim("biased"),
    lineage="gspo, open to per-decision advantages",
)

cispo = Method(
    name="cispo",
    title="CISPO",
    sampler=Sampler(group=16, minibatches=16),
    credit=Total(),
    baseline=GroupMean(),
    scale=GroupStd(ddof=0, eps=1e-6),
    ratio=DecisionRatio(),
    trust=Cap(high=5.0, low=0.0),
    aggregate=DecisionMean(),
    update=Adam(1e-6),
    claim=Claim("biased"),
    target="as grpo without KL: per prompt arcsin(sqrt p)",
    lineage="grpo with the ratio capped as a weight, not clipped",
    differs="no dynamic sampling and no length penalty; the cap is ScaleRL's absolute 5, MiniMax's is unstated",
    settings=(
        Setting("cap", 5.0, "Khatri et al. 2025 (ScaleRL), as quoted in TRL's paper index"),
        Setting("minibatches", 16, "MiniMax-M1 2025"),
        Setting("G", 16, "Khatri et al. 2025 (ScaleRL), as quoted in TRL's paper index"),
    ),
)

vineppo = Method(
    name="vineppo",
    title="VinePPO",
    sampler=Sampler(values="rollouts", value_rollouts=9),
    credit=GAE(gamma=1.0, lam=0.0),
    baseline=Critic(),
    scale=BatchStd(ddof=1, eps=1e-8, center=True),
    ratio=DecisionRatio(),
    trust=Clip(0.2, 0.2),
    aggregate=DecisionMean(),
    update=Adam(1e-6),
    claim=Claim("proportional", given="a large batch"),
    target=BEST_REWARD,
    lineage="ppo with Monte-Carlo values in place of the critic",
    differs="a step is one decision, and the KL penalty is left out",
    settings=(
        Setting("K", 9, "Kazemnejad et al. 2024, its MATH configuration"),
        Setting("eps, gamma", (0.2, 1.0), "Kazemnejad et al. 2024, its MATH configuration"),
        Setting("learning rate", 1e-6, "Kazemnejad et al. 2024, its MATH configuration"),
    ),
)

gpg = Method(
    name="gpg",
    title="Group policy gradient for MDPs",
    sampler=Sampler(group=8),
    credit=RewardToGo(),
    baseline=SiblingMean(leave_one_out=False),
    ratio=DecisionRatio(),
    trust=Clip(0.2, 0.2),
    aggregate=DecisionMean(),
    claim=Claim("(1-1/G) of the gradient", given="a large batch"),
    target=BEST_REWARD,
    lineage="reinforce_togo + the siblings' mean at the same time step",
    differs="bins are time steps (f = t) only",
    settings=(
        Setting("A_t", "R_t - mean of the bin", "Chen et al. 2025, eq. 5-6"),
        Setting("G", 8),
        Setting("eps", 0.2),
    ),
)

raft = Method(
    name="raft",
    title="RAFT (rejection-sampling fine-tuning)",
    sampler=Sampler(group=8, keep=KeepBest()),
    credit=Imitate(),
    aggregate=Sum(),
    claim=Claim("biased"),
    target="argmax E[R], through imitation of the best of G",
    lineage="supervised fine-tuning on one's own best samples",
    differs="ties are shared instead of broken at random",
    settings=(Setting("keep", "best of K", "Dong et al. 2023, algorithm 1"), Setting("K", 8)),
)

dpo = Method(
    name="dpo",
    title="DPO",
    sampler=Sampler(group=2, proposer="reference", feedback="preference"),
    credit=Total(),
    baseline=LeaveOneOut(),
    trust=PairLogistic(beta=0.1),
    aggregate=Sum(),
    update=Adam(1e-6),
    claim=Claim("biased"),
    target=TILTED,
    lineage="the closed form of pi*, turned into a classifier of pairs",
    differs="nothing; its step differs from the gradient but its minimum is pi*",
    settings=(
        Setting("beta", 0.1, "Rafailov et al. 2023, appendix B"),
        Setting("learning rate", 1e-6, "Rafailov et al. 2023, appendix B"),
    ),
)

distill = Method(
    name="distill",
    title="On-policy distillation",
    sampler=Sampler(feedback="none"),
    credit=RewardToGo(),
    aggregate=Sum(),
    kl=KL("reward", "k1", beta=1.0),
    claim=Claim("unbiased"),
    target="the teacher",
    lineage="reinforce_togo whose only reward is the log-ratio to a teacher",
    differs="the whole sequence's reverse KL (reward-to-go), where common code takes each token's own term",
    settings=(Setting("r_t", "log teacher - log pi", "Gu et al. 2024 (MiniLLM); Agarwal et al. 2024 (GKD)"),),
)

METHODS: dict[str, Method] = {
    m.name: m
    for m in (
        reinforce, reinforce_togo, reinforce_batch_mean, reinforce_pp, reinforce_pp_baseline, a2c, trpo, ppo,
        ppo_rlhf, rloo, remax, grpo, grpo_process, dr_grpo, dapo, gspo, gspo_token, cispo, vineppo, gpg, raft,
        dpo, distill,
    )
}  # fmt: skip


def method(name: str) -> Method:
    """The catalogue entry of that name. Raises UnknownName with the nearest one.

    >>> method("ppo").credit
    GAE(gamma=0.99, lam=0.95)
    """
    if name not in METHODS:
        raise UnknownName("method", name, METHODS)
    return METHODS[name]
