"""`cases` marks the exhaustive parameters of a kernel's tests."""

from __future__ import annotations

from surogate_core.testing.cases import cases


def test_more_cases_are_marked_exhaustive_and_few_are_not() -> None:
    found = [(case.values, [mark.name for mark in case.marks]) for case in cases([(7, 5), 9], more=[1])]
    assert found == [(((7, 5),), []), ((9,), []), ((1,), ["exhaustive"])]


def test_the_keys_of_a_mapping_are_the_ids() -> None:
    found = [(case.id, case.values, len(case.marks)) for case in cases({"odd": 7}, more={"large": 1 << 20})]
    assert found == [("odd", (7,), 0), ("large", (1 << 20,), 1)]
