"""What the documents say is there: links, commands with their options, targets of make."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from agentctl.main import main as agentctl

ROOT = Path(__file__).parents[2]
DOCS = sorted(
    path
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("ansible/**/*.md")]
    if path.name != "CHANGELOG.md"
)
_FENCED = re.compile(r"^```\w*\n(.*?)^```", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")
_HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)
_PLACEHOLDER = re.compile(r"^[A-Z][A-Z0-9_-]*$|^[\[<{(]|\.\.\.|…|\|")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(text: str) -> list[str]:
    """Return the code blocks of a document."""
    return _FENCED.findall(text)


def commands(text: str, program: str) -> list[list[str]]:
    """Return the words after `program` wherever a document shows it being run."""
    lines = [line for block in blocks(text) for line in block.splitlines()]
    lines += _INLINE.findall(_FENCED.sub("", text))
    found = []
    for line in lines:
        start = re.match(rf"(?:\$ )?(?:sudo )?(?:\S*/)?{program} (?=\S)(.*)", line.strip())
        if start is None:
            continue
        try:
            words = shlex.split(start.group(1), comments=True)
        except ValueError:
            continue
        for stop in ("|", ">", "&&", ";"):
            if stop in words:
                words = words[: words.index(stop)]
        found.append(words)
    return found


def anchor(heading: str) -> str:
    """Return the anchor that forges make of a heading."""
    kept = re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", heading).lower())
    return kept.replace(" ", "-")


def unknown(words: list[str]) -> str:
    """Return what agentctl would not know of a command line, '' if it knows all of it."""
    command: click.Command = agentctl
    rest = list(words)
    context = click.Context(command)
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        name = rest.pop(0)
        if _PLACEHOLDER.search(name):
            return ""
        found = command.get_command(context, name)
        if found is None:
            return f"no verb {name}"
        command = found
    options = {"--help", "-h", "--version"}
    for parameter in command.params:
        options.update(parameter.opts)
        options.update(parameter.secondary_opts)
    for word in rest:
        option = word.strip("[]").partition("=")[0]
        if re.match(r"--?[a-z]", option) and option not in options:
            return f"no option {option} of {command.name}"
    return ""


@pytest.mark.parametrize("path", DOCS, ids=name_of)
def test_links_lead_somewhere(path: Path) -> None:
    for target, fragment in _LINK.findall(path.read_text()):
        if "://" in target or target.startswith("mailto:"):
            continue
        there = (path.parent / target).resolve()
        assert there.exists(), f"{target} is not there"
        if fragment and there.suffix == ".md":
            anchors = {anchor(heading) for heading in _HEADING.findall(there.read_text())}
            assert fragment[1:] in anchors, f"{target}{fragment}: no such heading"


@pytest.mark.parametrize("path", DOCS, ids=name_of)
def test_verbs_and_options_of_agentctl_exist(path: Path) -> None:
    wrong = [
        f"agentctl {shlex.join(words)}: {why}"
        for words in commands(path.read_text(), "agentctl")
        if (why := unknown(words))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", DOCS, ids=name_of)
def test_targets_of_make_exist(path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    benches = re.search(r"^BENCHES := (.*)$", makefile, re.MULTILINE)
    assert benches is not None
    targets = set(re.findall(r"^([a-z0-9-]+):", makefile, re.MULTILINE))
    targets |= {f"bench-{name}" for name in benches.group(1).split()}
    asked = {
        word
        for words in commands(path.read_text(), "make")
        for word in words
        if re.match(r"[a-z][a-z0-9-]*$", word)
    }
    assert asked <= targets


def test_a_verb_or_option_that_is_not_there_is_found() -> None:
    text = (
        "```\nagentctl drain n1 --dead-line 3m   # typo\n```\nor `agentctl dräin n1`, `agentctl ls`"
    )
    assert [unknown(words) for words in commands(text, "agentctl")] == [
        "no option --dead-line of drain",
        "no verb dräin",
        "",
    ]


def test_the_translated_readme_shows_the_same_commands_and_links() -> None:
    english, chinese = ((ROOT / name).read_text() for name in ("README.md", "README.zh-CN.md"))
    assert blocks(english) == blocks(chinese)
    other = {"README.md", "README.zh-CN.md"}
    links = [{target for target, _ in _LINK.findall(text)} - other for text in (english, chinese)]
    assert links[0] == links[1]
    assert english.count("\n## ") == chinese.count("\n## ")
