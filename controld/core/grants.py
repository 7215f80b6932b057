"""Who may do what: grants, and what follows from them for one caller."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, get_args

Verb = Literal[
    "submit", "read", "list", "cancel", "explain",
    "pools-read", "pools-write",
    "nodes-read", "fleet-read", "drain", "reflect",
]  # fmt: skip
VERBS: tuple[Verb, ...] = get_args(Verb)
TASK_VERBS: frozenset[Verb] = frozenset({"submit", "read", "list", "cancel", "explain"})
"""They concern a task: its pool and its tenant."""
POOL_VERBS: frozenset[Verb] = frozenset({"pools-read", "pools-write"})
"""They concern a pool. All others concern the whole fleet."""

ALL = "*"
ANONYMOUS = "anonymous"

_CALLERS_KEPT = 1024
_ANSWERS_KEPT = 4096
_LONGEST_KEPT = 200
"""Pool and tenant together: what a client makes up must not fill the memory."""


@dataclass(frozen=True, slots=True)
class Who:
    """A caller as grants see it: a certificate's holder, or the subject of a token."""

    identity: str = ""
    """As `operator/alice`, or ANONYMOUS; '' when a token's subject speaks."""
    subject: str = ""
    groups: tuple[str, ...] = ()
    plain: bool = False
    """It came over plain text, which is there only where somebody asked for it."""


@dataclass(frozen=True, slots=True)
class Grant:
    """Lets those whom one of its globs names do its verbs, in its pools, for its tenants.

    A verb that concerns no tenant is given only by a grant for all tenants, one that
    concerns no pool only by a grant for all pools, too: a limit never widens anything.
    """

    identities: tuple[str, ...] = ()
    subjects: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    verbs: tuple[str, ...] = ()
    pools: tuple[str, ...] = (ALL,)
    tenants: tuple[str, ...] = (ALL,)

    def names(self, who: Who) -> bool:
        """Whether `who` is one of those that it is for."""
        return (
            bool(who.identity and _any(self.identities, who.identity))
            or bool(who.subject and _any(self.subjects, who.subject))
            or any(_any(self.groups, group) for group in who.groups)
        )

    def gives(self) -> list[Verb]:
        """Return the verbs that it gives, for some pool and tenant at least."""
        wide = [ALL in self.pools, ALL in self.tenants]
        return [
            verb
            for verb in VERBS
            if (ALL in self.verbs or verb in self.verbs)
            and (verb in TASK_VERBS or (wide[1] and (wide[0] or verb in POOL_VERBS)))
        ]


DEFAULTS = (
    Grant(identities=("operator/*",), verbs=(ALL,)),
    Grant(identities=("client/*",), verbs=("submit", "read", "cancel")),
)
"""What holds where no grant is configured."""
EVERYTHING = (Grant(verbs=(ALL,)),)


class Rights:
    """What one caller may do. Answers are kept: asking again costs one look-up."""

    def __init__(self, name: str, grants: Iterable[Grant]) -> None:
        self.name = name
        self.grants = tuple(grants)
        self._by_verb: dict[str, list[Grant]] = {}
        for grant in self.grants:
            for verb in grant.gives():
                self._by_verb.setdefault(verb, []).append(grant)
        self._everywhere = frozenset(
            verb
            for verb, given in self._by_verb.items()
            if any(ALL in grant.pools and ALL in grant.tenants for grant in given)
        )
        self._answers: dict[tuple[str, str, str | None], bool] = {}

    def holds(self, verb: Verb) -> bool:
        """Whether the caller may do this at all, in some pool."""
        return verb in self._by_verb

    def everywhere(self, verb: Verb) -> bool:
        """Whether the caller may do this in every pool and for every tenant."""
        return verb in self._everywhere

    def may(self, verb: Verb, pool: str, tenant: str | None = None) -> bool:
        """Whether the caller may do this in `pool` for `tenant`.

        `tenant` is '' for what is nobody's; None asks whether any tenant would do.
        """
        key = (verb, pool, tenant)
        answer = self._answers.get(key)
        if answer is None:
            answer = self._decide(verb, pool, tenant)
            if len(pool) + len(tenant or "") <= _LONGEST_KEPT:
                if len(self._answers) >= _ANSWERS_KEPT:
                    self._answers.clear()
                self._answers[key] = answer
        return answer

    def refusal(self, verb: Verb, pool: str | None = None, tenant: str | None = None) -> str:
        """Return, in one line, who may not do what, and where."""
        where = "" if pool is None else f" in pool {_shown(pool)}"
        whose = f" for tenant {_shown(tenant)}" if tenant else ""
        line = f"{self.name} may not {verb}{where}{whose}"
        if tenant == "" and pool is not None and self.may(verb, pool):
            line += " without naming a tenant"
        return f"{line}; `agentctl whoami` shows what is granted"

    def _decide(self, verb: Verb, pool: str, tenant: str | None) -> bool:
        return any(
            _any(grant.pools, pool) and (tenant is None or _any(grant.tenants, tenant))
            for grant in self._by_verb.get(verb, ())
        )


class Grants:
    """All grants of a controld, and what follows from them for each caller."""

    def __init__(self, configured: Sequence[Grant] = ()) -> None:
        self._configured = tuple(configured)
        self._rights: dict[tuple[str, Who], Rights] = {}

    def rights(self, name: str, who: Who) -> Rights:
        """Return what `who`, called `name` in messages, may do; the same object every time."""
        found = self._rights.get((name, who))
        if found is None:
            if len(self._rights) >= _CALLERS_KEPT:
                self._rights.clear()
            found = self._rights[name, who] = Rights(name, self._given(who))
        return found

    def _given(self, who: Who) -> Iterable[Grant]:
        if not self._configured and who.plain:
            return EVERYTHING
        return [grant for grant in self._configured or DEFAULTS if grant.names(who)]


def _any(globs: Iterable[str], name: str) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)


def _shown(name: str) -> str:
    """Return a name from outside so that it fits in a line."""
    return name if name.isascii() and name.isidentifier() else repr(name[:80])
