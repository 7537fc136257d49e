"""Suites: a checkout is recognised, the mock is given its requests, and its log is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.engines import Engine, EngineFailed, under_v1
from tests.conformance.suites import Suite, SuiteFailed, recognise

SPEC = """openapi: 3.1.0
info:
  /not/a/path: 1
paths:
  /models:
    get:
      summary: |
        GET /models
  /models/{model}:
    delete: {}
components:
  /neither: 1
"""
LOG = b"""Steady wrote a line of its own
{"type":"startup","spec":{}}
{"type":"request","request":{"method":"GET","path":"/v1/a","query":"?x[]=1"},"response":{"status":200},"diagnostics":[]}
{"type":"request","request":{"method":"GET","path":"/v1/a","query":"?x[]=1"},"response":{"status":200}}
{"type":"request","request":{"method":"POST","path":"/v1/b"},"response":{"status":400},
"""


@pytest.mark.parametrize(("name", "version"), [("openai", "3.3.1"), ("anthropic", "0.9"), ("langchain-tests", "1.1.9")])
def test_a_checkout_is_known_by_its_project(tmp_path: Path, name: str, version: str) -> None:
    (tmp_path / "pyproject.toml").write_text(f'[project]\nname = "{name}"\nversion = "{version}"\n')
    suite = recognise(tmp_path, tmp_path / "made")
    assert (suite.name, suite.version) == (name, version)
    assert suite.folder == tmp_path / "made" / name and not suite.folder.exists()


def test_anything_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SuiteFailed, match=r"no pyproject\.toml"):
        recognise(tmp_path)
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "flask"\n')
    with pytest.raises(SuiteFailed, match="none of"):
        recognise(tmp_path)


def test_only_the_paths_of_a_description_go_under_v1() -> None:
    expected = SPEC.replace("  /models:", "  /v1/models:").replace("  /models/{model}:", "  /v1/models/{model}:")
    assert under_v1(SPEC) == expected
    assert under_v1(SPEC.partition("components")[0]) == expected.partition("components")[0]
    assert under_v1(expected) == expected, "they are there already"
    with pytest.raises(EngineFailed):
        under_v1("{}")


def test_the_mocks_log_tells_what_was_received(tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    log.write_bytes(LOG)
    engine = Engine("http://127.0.0.1:1", log)
    assert engine.received() == {"GET /v1/a?x[]=1 200": 2}
    mark = engine.mark
    with log.open("ab") as more:
        more.write(
            b'{"type":"request","request":{"method":"PUT","path":"/v1/c"},"response":{"status":400},'
            b'"diagnostics":[{"code":"E2"},{"code":"E1"},{"code":"E2"}]}\n'
        )
    assert engine.received(mark) == {"PUT /v1/c 400 E1 E2": 1}
    assert (Engine("http://127.0.0.1:1").mark, Engine("http://127.0.0.1:1").received()) == (0, {})


def test_every_suite_is_told_where_to_go() -> None:
    def told(name: str) -> dict[str, str]:
        return Suite(Path("x"), name, "1", Path("y")).addresses("http://127.0.0.1:1/e/x", "stub")

    for name in ("openai", "langchain-tests"):
        assert told(name)["OPENAI_BASE_URL"] == told(name)["ANTHROPIC_BASE_URL"] + "/v1"
    assert told("openai")["TEST_API_BASE_URL"] == "http://127.0.0.1:1/e/x/v1"
    assert told("anthropic")["TEST_API_BASE_URL"] == "http://127.0.0.1:1/e/x", "its paths begin with /v1"


@pytest.mark.parametrize(("wanted", "script", "words"), [
    (None, "npx @stdy/cli@0.22.2", "no OpenAPI description"), ("nowhere.yml", "", "no OpenAPI description nowhere.yml"),
    ("here.yml", "npx another", "mock's version"),
])  # fmt: skip
def test_a_mock_needs_a_description_and_a_version(tmp_path: Path, wanted: str | None, script: str, words: str) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "mock").write_text(script)
    (tmp_path / "here.yml").write_text(SPEC)
    suite = Suite(tmp_path, "anthropic", "1", tmp_path / "made")
    named = str(tmp_path / wanted) if wanted == "here.yml" else wanted
    with pytest.raises(SuiteFailed, match=words), suite.engine(named):
        pass


@pytest.mark.parametrize(("place", "text"), [
    ("package.json", '{"devDependencies": {"@stdy/cli": "0.22.1"}}'), ("scripts/mock", "npx @stdy/cli@0.22.1 -- x"),
])  # fmt: skip
def test_the_suite_says_which_mock_it_is_for(tmp_path: Path, place: str, text: str) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / place).write_text(text)
    assert Suite(tmp_path, "openai", "1", tmp_path / "made").mock_version() == "0.22.1"
