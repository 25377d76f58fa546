"""How much a run of the tests does: `pytest --tier ci|nightly|heavy`. Every size that depends on it is given here.

ci        few examples, always the same ones; small proofs on real SGLang; without what stands below, so that it takes
          minutes
nightly   many examples, other ones each time
heavy     storms, and the proofs on real SGLang at full length
"""

from __future__ import annotations

from typing import TypeVar

from hypothesis import HealthCheck, settings

TIERS = ("ci", "nightly", "heavy")
#: Of the examples and rounds of the nightly tier, what the others have.
SHARE, LEAST = 6, 8

#: Left to the nightly tier: many variations of what other files show once, and what takes long.
NIGHTLY = frozenset(
    {
        "tests/docs/test_screenshots.py",
        "tests/docs/test_snippets.py",
        "tests/e2e/test_added_engine.py",
        "tests/e2e/test_audit.py",
        "tests/e2e/test_calls_sent_back.py",
        "tests/e2e/test_command.py",
        "tests/e2e/test_dashboard.py",
        "tests/e2e/test_dropped_fields.py",
        "tests/e2e/test_long_texts.py",
        "tests/e2e/test_loop.py",
        "tests/e2e/test_machines.py",
        "tests/e2e/test_placement_benchmark.py",
        "tests/e2e/test_private_names.py",
        "tests/e2e/test_reach.py",
        "tests/e2e/test_tokenizer_agreement.py",
        "tests/e2e/test_view.py",
        "tests/faults/test_invalid_numbers.py",
        "tests/faults/test_large_answers.py",
        "tests/faults/test_left_turns.py",
        "tests/faults/test_machines.py",
        "tests/faults/test_owners_end.py",
        "tests/faults/test_state_of_sessions.py",
        "tests/faults/test_text_kills.py",
        "tests/fuzz/test_fuzz.py",
        "tests/packaging/test_wheel.py",
    }
)
#: Of these, the tests on real SGLang are left to the heavy tier.
HEAVY = frozenset(
    {
        "tests/contract/test_chat_templates.py",
        "tests/contract/test_odd_chat.py",
        "tests/e2e/test_audit_real_sglang.py",
        "tests/e2e/test_cut_turns_real_sglang.py",
        "tests/e2e/test_access_rules_real_sglang.py",
        "tests/e2e/test_exact_tokens.py",
        "tests/e2e/test_messages_real_sglang.py",
        "tests/e2e/test_moves_real_sglang.py",
        "tests/e2e/test_odd_calls_real_sglang.py",
        "tests/e2e/test_old_caches_real_sglang.py",
        "tests/e2e/test_parsers_real_sglang.py",
        "tests/e2e/test_real_stalls.py",
        "tests/e2e/test_session_contract_real_sglang.py",
        "tests/e2e/test_teachers_real_sglang.py",
        "tests/e2e/test_trained_models_real_sglang.py",
        "tests/e2e/test_vllm.py",
        "tests/e2e/test_weight_updates.py",
        "tests/training/test_training.py",
    }
)

Size = TypeVar("Size")

_tier = "ci"


def choose(tier: str) -> None:
    """Called before any module of tests is imported."""
    global _tier
    _tier = tier
    # A machine may be busy: how long an example takes says nothing.
    patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
    settings.register_profile("nightly", patient, print_blob=True)
    settings.register_profile("few", patient, max_examples=examples(100), derandomize=True, database=None)
    settings.load_profile("nightly" if tier == "nightly" else "few")


def is_left(nodeid: str, *, sglang: bool) -> bool:
    """Whether CI leaves a test to another tier."""
    file = nodeid.partition("::")[0]
    return _tier == "ci" and (file in HEAVY if sglang else file in NIGHTLY)


def examples(nightly: int) -> int:
    """Examples of a property, or rounds of a loop over random cases, by how many the nightly tier has."""
    return nightly if _tier == "nightly" else min(nightly, max(LEAST, nightly // SHARE))


def nightly() -> bool:
    """Whether this is the tier of tests that take long and need no SGLang."""
    return _tier == "nightly"


def heavy() -> bool:
    """Whether this is the tier of long proofs on real SGLang."""
    return _tier == "heavy"


def fuzzing(runs: int) -> tuple[int | None, float | None, int | None]:
    """For how many runs and seconds a target is fuzzed, and with which seed; None for another one each time."""
    return (None, 60.0, None) if nightly() else (runs, None, 0)


def size(*, heavy: Size, otherwise: Size) -> Size:
    """The size of a proof or a storm."""
    return heavy if _tier == "heavy" else otherwise
