"""Documentation that repeats the code must repeat it exactly."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import get_args

import click
import pytest

from ajet_proxy.cli import cli as proxy_command
from ajet_proxy.core.continuity.memory import Outcome
from ajet_proxy.core.trajectory import drift
from ajet_proxy.settings import SETTINGS
from ajet_proxy.settings import Config as ProxyConfig
from ajet_sdk.cli import ajet as sdk_command
from ajet_trainer import evaluation, gate, keeper, link, trained_rows
from ajet_trainer.cli import cli as trainer_command
from ajet_trainer.config import SETTINGS as TRAINER_SETTINGS
from ajet_trainer.config import Config as TrainerConfig
from ajet_trainer.engines import weights
from tests.kit.pages import PAGES, bad_citations, broken_links, contract, table_of, tables, words
from tests.kit.source import FOLDERS, ROOT, modules
from tests.test_arrows import CORE, IO

COMMANDS: dict[str, click.Command] = {"ajet": sdk_command, "ajet-proxy": proxy_command, "ajet-trainer": trainer_command}
NAMED = r"(ajet_\w+|core|io|tests(?!/api)|docs|integrations|\.ci)(/[\w.-]+)+/?|(?!beta/)[\w./-]+\.py"
"""A path of the repository, or the end of one of a module; not of a project whose tests are run."""
MODULES = modules(*FOLDERS)
ABOUT_CITATIONS = ("tests/test_docs.py", "tests/test_contract.py", "tests/test_contract_wire.py", "tests/kit/pages.py")


def test_the_settings_page_lists_every_setting() -> None:
    page = (ROOT / "docs/reference/settings.md").read_text()
    assert table_of(SETTINGS) in page and table_of(TRAINER_SETTINGS) in page


def test_both_programs_have_few_settings() -> None:
    """Besides them there are three tables, whose keys are a tenant's quotas, the lanes, and verl's own."""
    own = [f.name for config in (ProxyConfig, TrainerConfig) for f in fields(config)]
    assert len(own) - len({"tenants", "mix", "verl"} & {*own}) <= 69


def test_the_limits_of_the_trainer() -> None:
    text = (ROOT / "docs/reference/limits.md").read_text().partition("## The trainer")[2]
    found = [float(row.split("|")[2].split()[0].replace(",", "")) for row in text.splitlines() if " s" in row]
    assert found == [keeper.LEASE_S, gate.DRAIN_S, weights.PUSH_S, link.DEADLINE_S, evaluation.EVAL_WAIT_S,
                     trained_rows.KEPT_STEPS]  # fmt: skip


def test_the_page_on_continuity_explains_every_word() -> None:
    text = (ROOT / "docs/explain/continuity.md").read_text().partition("| word | meaning |\n")[2]
    assert tuple(re.findall(r"^\| `(\w+)` \| \w.* \|$", text.partition("\n\n")[0], re.MULTILINE)) == get_args(Outcome)


def test_each_name_of_a_break_is_explained_and_says_whether_it_is_drift() -> None:
    text = (ROOT / "docs/explain/continuity.md").read_text().partition("`broken_by`\n")[2]
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| (yes )?\|$", text.partition("What counts")[0], re.MULTILINE))
    assert set(rows) == set(re.findall(r"^`(\w+)`", drift.__doc__ or "", re.MULTILINE))
    assert {name for name, counts in rows.items() if counts} == set(drift.DRIFTED)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    """Some pages leave out the package of a room, or the folders of a module."""
    named = [word for word in words(page.read_text()) if re.fullmatch(NAMED, word)]
    ends = {"/".join(module.parts[place:]) for module in MODULES for place in range(len(module.parts))}
    there = (ROOT, ROOT / "ajet_proxy")
    assert [path for path in named if path not in ends and not any((root / path).exists() for root in there)] == []


def test_the_tests_that_contributors_are_told_of_are_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    texts = [(ROOT / module).read_text() for module in modules("tests")]
    defined = {name for one in texts for name in re.findall(r"def (test_\w+)", one)}
    named = [word for word in words(text) if re.fullmatch(r"test_\w+", word)]
    assert len(named) > 15
    assert [name for name in named if name not in defined] == []
    known = contract()
    assert [number for number in re.findall(r"§(\d[\d.]*\d|\d)", text) if number not in known] == []


def test_each_of_ten_changes_has_its_files() -> None:
    (table,) = tables((ROOT / "docs" / "changes.md").read_text())
    rows = {cells[0]: [word for word in words(" ".join(cells[1:])) if "/" in word] for cells in table}
    assert len(rows) == 10 and all(rows.values())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    assert list(broken_links(page, page.read_text())) == []


def test_each_file_in_which_a_change_begins_stands_in_a_line_of_the_architecture_page() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    lines = (line.partition(": ")[0] for line in text.splitlines() if re.match(r"- |\d+\. ", line))
    begin = {word for line in lines for word in words(line)}
    (table,) = tables((ROOT / "docs" / "changes.md").read_text())
    files = {word for row in table for word in words(" ".join(row[1:])) if word.endswith(".py")}
    assert files - begin == set()


def test_the_index_names_every_page_once() -> None:
    index = ROOT / "docs" / "README.md"
    named = re.findall(r"^- \[[^\]]*\]\(([\w/.-]+\.md)\): ", index.read_text(), re.MULTILINE)
    pages = [str(page.relative_to(index.parent)) for page in index.parent.rglob("*.md") if page != index]
    assert sorted(named) == sorted(pages)


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    (tmp_path / "other.md").write_text("# Its `name`: one\n\n## Twice\n\n## Twice\n```sh\n# no heading\n```\n")
    page.write_text("# Here\n")
    good = "[a](other.md) [b](other.md#its-name-one) [c](other.md#twice-1) [d](#here) [e](https://x.y/#z) `[f](g)`"
    assert list(broken_links(page, f"# Here\n{good}")) == []
    wrong = ["none.md", "other.md#no-heading", "other.md#twice-2", "#there", "../page.md"]
    found = list(broken_links(page, "# Here\n" + " ".join(f"[x]({target})" for target in wrong)))
    assert [line.partition(":")[0] for line in found] == wrong


@pytest.mark.parametrize("module", [path for path in MODULES if str(path) not in ABOUT_CITATIONS], ids=str)
def test_every_citation_of_the_contract_names_a_section_that_is_there(module: Path) -> None:
    assert bad_citations((ROOT / module).read_text(), set(contract())) == []


def test_a_citation_of_no_section_is_found() -> None:
    text = "contract §1, contract §1.1; (the contract)\n# contract\n# §1 contract §9.9 contract section 1"
    assert bad_citations(text, {"1", "1.1"}) == ["contract", "contract §9.9", "contract"]


def test_the_architecture_page_lists_the_rooms_and_their_arrows() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    for rooms in (CORE, IO):
        for room, others in rooms.items():
            known = ", ".join(f"`{other}`" for other in rooms if other in others) or "nothing"
            assert f"\n| `{room}` | {known} | " in page, room


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_begins_with_what_it_is_for(page: Path) -> None:
    text = page.read_text()
    title, _, rest = text.partition("\n\n")
    assert title.startswith("# ") and re.match(r"[A-Z`*a-z]", rest), "the first lines say what the reader gets"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 100


@pytest.mark.parametrize("name", ["ajet", "ajet-proxy", "ajet-trainer"])
def test_the_summaries_of_help_are_whole_sentences(name: str) -> None:
    for path, command in shown(COMMANDS[name], name):
        summary = " ".join((command.help or "").partition("\n\n")[0].split())
        assert re.fullmatch(r"[A-Z][a-z]+ [^.]*\.", summary), f"{path}: {summary!r}"
        if isinstance(command, click.Group):
            context = click.Context(command, terminal_width=80, **command.context_settings)
            listed = command.get_help(context).partition("Commands:")[2]
            assert listed and "..." not in listed, f"{path}: a summary is cut off"


def shown(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    """`command` and all commands below it, by what a user types."""
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from shown(below, f"{path} {name}")
