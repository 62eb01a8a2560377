"""Which arms a benchmark has: plans, rules and drafters of our loop, and transformers' own decoding beside them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distill.config import opt, to_dict
from distill.decode import Typical, check_thresholds
from distill.drafters.draft_model import DraftModel
from distill.errors import UserError
from distill.tree import PlanConfig, Static
from serve_eval.arms import Arm, DecoderArm, PeerArm, TransformersArm
from serve_eval.checkpoint import Pair, plan_for, without_weights

if TYPE_CHECKING:
    from serve_eval.bench import Config

BASELINE_LENGTH = 3


@dataclass(kw_only=True)
class ArmConfig(PlanConfig):
    """A further arm: a plan, and what differs from the benchmark's own settings."""

    drafter: dict[str, Any] | None = opt(
        None, "a drafter without weights, e.g. {name: prompt_lookup}; null: the main one"
    )
    verifier: str | None = opt(None, "verification rule; null: the main one")
    candidates: str | None = opt(None, "how drafts are picked; null: the main way, or auto with another verifier")


def decoder_arms(config: "Config", pair: Pair) -> list[DecoderArm]:
    """Plain decoding, then every plan, rule and drafter that was asked for; names tell apart what differs.

    Raises:
        UserError: a combination that does not go together, or the same arm twice.
    """
    sampling, thresholds = config.sampling(), Typical(epsilon=config.typical_epsilon, delta=config.typical_delta)
    arms = [DecoderArm(pair.target, sampling=sampling, engine=config.engine)]
    plans = (config.tree, *config.trees, *_baselines(config))
    for tree in (ArmConfig(**to_dict(plan)) for plan in plans):
        drafter = pair.drafter if tree.drafter is None else without_weights(tree.drafter, pair.target)
        assert drafter is not None
        verifier = tree.verifier or config.verifier
        candidates = tree.candidates or (config.candidates if verifier == config.verifier else "auto")
        arm = DecoderArm(
            pair.target,
            drafter=drafter,
            plan=plan_for(drafter, tree, sampling),
            sampling=sampling,
            verifier=verifier,
            candidates=candidates,
            typical=thresholds,
            engine=config.engine,
        )
        marks = [drafter.name] if drafter is not pair.drafter else []
        marks += [arm.name, *([verifier] if tree.verifier else []), *([candidates] if tree.candidates else [])]
        arm.name = " ".join(marks)
        if arm.name in [other.name for other in arms]:
            raise UserError(f"tree and trees must be different arms, got {arm.name} twice")
        arms.append(arm)
    check_thresholds(
        thresholds, [config.verifier, *(tree.verifier for tree in config.trees if isinstance(tree, ArmConfig))]
    )
    return arms


def _baselines(config: "Config") -> list[ArmConfig]:
    """Drafters without weights as arms; ``match`` goes with all of them."""
    verifier = None if config.verifier == "match" else "match"
    length = _longest_chain([config.tree, *config.trees])
    return [
        ArmConfig(name="chain", length=length, drafter={"name": name}, verifier=verifier) for name in config.baselines
    ]


def _longest_chain(trees: Sequence[PlanConfig]) -> int:
    """The main drafter's longest chain, which drafters of chains are compared with."""
    own = (tree for tree in trees if not getattr(tree, "drafter", None))
    return max((tree.length for tree in own if tree.name == "chain"), default=BASELINE_LENGTH)


def transformers_arms(config: "Config", pair: Pair, decoders: Sequence[DecoderArm]) -> list[Arm]:
    """Transformers' own decoding, as far as it was asked for.

    Raises:
        UserError: assisted generation without a draft model of ours and a chain to compare it with.
    """
    sampling, arms = config.sampling(), list[Arm]()
    if config.hf:
        arms.append(TransformersArm(pair.target, sampling=sampling))
    own = [arm.plan for arm in decoders if arm.drafter is pair.drafter]
    chains = [plan.depth for plan in own if isinstance(plan, Static) and plan.name == "chain"]
    if config.hf_assisted:
        draft: Any = pair.drafter.backbone.model if isinstance(pair.drafter, DraftModel) else None
        if draft is None or not chains:
            raise UserError(
                "hf_assisted must be false without a draft model and a chain to compare with, got "
                f"drafter {pair.drafter.name if pair.drafter else 'none'} and {len(chains)} chains"
            )
        arms += [PeerArm.assisted(pair.target, draft, sampling=sampling, length=n) for n in dict.fromkeys(chains)]
    if config.hf_lookup:
        length = _longest_chain([config.tree, *config.trees])
        arms.append(PeerArm.lookup(pair.target, sampling=sampling, length=length))
    return arms
