"""Who may do what: grants are additive, limits hold, and answers do not depend on their order."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controld.core import grants
from controld.core.grants import (
    ANONYMOUS,
    POOL_VERBS,
    TASK_VERBS,
    VERBS,
    Grant,
    Grants,
    Rights,
    Verb,
    Who,
)

OPERATOR = Who(identity="operator/alice")
CLIENT = Who(identity="client/batch-1")
NODE = Who(identity="agentd/n1")
MONITOR = Who(identity="monitor/m")
SUBJECT = Who(subject="bob", groups=("ml", "all"))


def rights(who: Who, *configured: Grant) -> Rights:
    return Grants(configured).rights("somebody", who)


@pytest.mark.parametrize(
    ("who", "verbs"),
    [
        (OPERATOR, set(VERBS)),
        (CLIENT, {"submit", "read", "cancel"}),
        (NODE, set()),
        (MONITOR, set()),
        (SUBJECT, set()),
        (Who(identity=ANONYMOUS, plain=True), set(VERBS)),
        (Who(subject="bob", plain=True), set(VERBS)),
    ],
)
def test_without_grants_the_role_says_what_one_may(who: Who, verbs: set[str]) -> None:
    found = rights(who)
    assert {verb for verb in VERBS if found.holds(verb)} == verbs
    assert all(found.everywhere(verb) for verb in VERBS if verb in verbs)


def test_a_configured_grant_replaces_the_defaults() -> None:
    grant = Grant(identities=("client/*",), verbs=("read",))
    assert not rights(OPERATOR, grant).holds("read")
    assert not rights(CLIENT, grant).holds("submit")
    assert rights(CLIENT, grant).holds("read")
    assert not rights(Who(identity=ANONYMOUS, plain=True), grant).holds("read")


@pytest.mark.parametrize(
    ("grant", "who", "named"),
    [
        (Grant(identities=("operator/*",)), OPERATOR, True),
        (Grant(identities=("operator/a?ice",)), OPERATOR, True),
        (Grant(identities=("*",)), SUBJECT, False),
        (Grant(subjects=("*",)), OPERATOR, False),
        (Grant(subjects=("bob",)), SUBJECT, True),
        (Grant(subjects=("bo",)), SUBJECT, False),
        (Grant(groups=("ml",)), SUBJECT, True),
        (Grant(groups=("m",)), SUBJECT, False),
        (Grant(groups=("*",)), Who(subject="bob"), False),
        (Grant(subjects=("operator/alice",)), OPERATOR, False),
        (Grant(identities=("Operator/alice",)), OPERATOR, False),
    ],
)
def test_a_grant_names_holders_subjects_and_groups_apart(
    grant: Grant, who: Who, named: bool
) -> None:
    assert grant.names(who) is named


def test_a_grant_for_some_pools_gives_nothing_of_the_whole_fleet() -> None:
    found = rights(CLIENT, Grant(identities=("*",), verbs=("*",), pools=("support*",)))
    assert {verb for verb in VERBS if found.holds(verb)} == TASK_VERBS | POOL_VERBS
    assert found.may("pools-write", "support-2")
    assert not found.may("pools-write", "codegen")
    assert not found.everywhere("submit")


def test_a_grant_for_some_tenants_gives_only_what_concerns_tasks() -> None:
    found = rights(CLIENT, Grant(identities=("*",), verbs=("*",), tenants=("acme",)))
    assert {verb for verb in VERBS if found.holds(verb)} == TASK_VERBS
    assert found.may("submit", "p", "acme")
    assert not found.may("submit", "p", "other")
    assert not found.may("submit", "p", "")
    assert found.may("submit", "p")


def test_pool_of_one_grant_and_tenant_of_another_do_not_add_up() -> None:
    found = rights(
        CLIENT,
        Grant(identities=("*",), verbs=("submit",), pools=("a",), tenants=("x",)),
        Grant(identities=("*",), verbs=("submit",), pools=("b",), tenants=("y",)),
    )
    assert [found.may("submit", *where) for where in itertools.product("ab", "xy")] == [
        True, False, False, True,
    ]  # fmt: skip


def test_a_refusal_names_who_verb_pool_and_tenant() -> None:
    found = rights(CLIENT, Grant(identities=("*",), verbs=("submit",), tenants=("acme",)))
    assert found.refusal("drain").startswith("somebody may not drain;")
    assert "somebody may not submit in pool p for tenant other;" in found.refusal(
        "submit", "p", "other"
    )
    assert "in pool p without naming a tenant;" in found.refusal("submit", "p", "")
    assert "\n" not in found.refusal("submit", "a\nb" * 100)


def test_what_clients_make_up_does_not_fill_the_memory() -> None:
    found = rights(CLIENT)
    for number in range(3 * grants._ANSWERS_KEPT):
        assert found.may("submit", f"pool-{number}", "t")
    assert len(found._answers) <= grants._ANSWERS_KEPT
    before = len(found._answers)
    assert found.may("submit", "p" * 10_000, "t")
    assert len(found._answers) == before

    many = Grants()
    for number in range(3 * grants._CALLERS_KEPT):
        many.rights("x", Who(identity=f"client/c{number}"))
    assert len(many._rights) <= grants._CALLERS_KEPT


def glob_matches(glob: str, name: str) -> bool:
    """Say what `*` and `?` mean, in the plainest way."""

    @cache
    def rest(g: int, n: int) -> bool:
        if g == len(glob):
            return n == len(name)
        if glob[g] == "*":
            return any(rest(g + 1, k) for k in range(n, len(name) + 1))
        return n < len(name) and glob[g] in ("?", name[n]) and rest(g + 1, n + 1)

    return rest(0, 0)


letters = st.text("ab-./|", max_size=6)
globs = st.text("ab-./|*?", max_size=6)


@given(globs, letters)
def test_globs_are_stars_and_question_marks_and_all_else_is_itself(glob: str, name: str) -> None:
    grant = Grant(identities=("*",), verbs=("submit",), pools=(glob,))
    assert rights(CLIENT, grant).may("submit", name, "") is glob_matches(glob, name)


grant_lists = st.lists(
    st.builds(
        Grant,
        identities=st.lists(st.sampled_from(["client/*", "operator/*", "*"]), max_size=2).map(
            tuple
        ),
        verbs=st.lists(st.sampled_from([*VERBS, "*"]), min_size=1, max_size=3).map(tuple),
        pools=st.lists(st.sampled_from(["*", "a*", "b", "?"]), min_size=1, max_size=2).map(tuple),
        tenants=st.lists(st.sampled_from(["*", "t", "?*"]), min_size=1, max_size=2).map(tuple),
    ),
    min_size=1,
    max_size=4,
)


@given(
    grant_lists,
    st.sampled_from(VERBS),
    st.sampled_from(["a", "ab", "b", "c"]),
    st.sampled_from(["", "t", "u"]),
)
def test_grants_add_up_in_any_order_and_nothing_else_gives(
    configured: list[Grant], verb: Verb, pool: str, tenant: str
) -> None:
    found = rights(CLIENT, *configured)
    one_by_one = [rights(CLIENT, each).may(verb, pool, tenant) for each in configured]

    assert found.may(verb, pool, tenant) is any(one_by_one)
    assert rights(CLIENT, *reversed(configured)).may(verb, pool, tenant) is any(one_by_one)
    assert found.may(verb, pool, tenant) is any(one_by_one), "asked again"
    if found.everywhere(verb):
        assert found.may(verb, pool, tenant)
    if found.may(verb, pool, tenant):
        assert found.holds(verb)
        assert found.may(verb, pool)
