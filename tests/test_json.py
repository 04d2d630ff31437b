"""`--json` prints one document on stdout, whatever happens, and every exit status is in the table of docs/faq.md."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from surogate import run
from surogate.cli import command_group, signals
from surogate.cli.app import app
from surogate.cli.external import CORE_COMMANDS
from surogate.cli.json_output import failure, print_json
from surogate_core import errors
from surogate_core.errors import ConfigError, PluginError, ProgramError, RunLost, RunStopped, SurogateError
from surogate_verify.verification import Extent

ROOT = Path(__file__).parents[1]

WITHOUT_JSON = {"schema", "chat"}  # the output of one is JSON without a flag, and the other talks

RUN = """
model: {model}
from_scratch: true
model_dtype: fp32
output_dir: {root}/out
datasets:
  - {{path: {root}/chat.jsonl, type: instruction, instruction_field: q, output_field: a, use_chat_template: false}}
sequence_len: 32
max_steps: 1
save_steps: 0
verify_outputs: false
"""


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def document(*arguments: object, status: int = 0) -> Any:
    """The one document on stdout of a command."""
    done = invoke(*arguments, "--json")
    assert done.exit_code == status, done.output
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("json")
    rows = [{"q": f"What is {n} + {n}?", "a": f"{n + n}"} for n in range(40)]
    (root / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)))
    path = root / "run.yaml"
    path.write_text(RUN.format(model=ROOT / "examples/tiny-qwen3", root=root))
    return path


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_every_command_takes_the_flag() -> None:
    lacking = {name for name in CORE_COMMANDS if "--json" not in invoke(name, "--help").stdout}
    assert lacking == WITHOUT_JSON


def test_a_trained_run_is_a_document_and_its_progress_is_on_stderr(config: Path, tmp_path: Path) -> None:
    done = invoke("train", config, "--set", f"output_dir={tmp_path / 'out'}", "--json")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result["steps"] == 1 and result["signal_exit"] == 0
    assert result["packing"]["packed"] == pytest.approx(result["packing"]["alone"], abs=result["packing"]["tolerance"])
    assert result["evaluations"][0].keys() == {"step", "loss", "labels"}
    assert Path(result["output_dir"], "model.safetensors").exists()
    assert "GiB planned" in done.stderr


def test_tokenized_documents_are_text_in_pieces(config: Path) -> None:
    shown = document("tokenize", config, "--debug")
    assert shown["datasets"][0]["documents"] == 40
    assert shown["datasets"][0]["lengths"].keys() == {"shortest", "median", "percentile_99", "longest"}
    assert shown["rows"]["train"]["tokens"] + shown["rows"]["validate"]["tokens"] == shown["datasets"][0]["tokens"]
    assert re.fullmatch(r".*/chat\.jsonl:\d+", shown["documents"][0]["row"])
    pieces = shown["documents"][0]["pieces"]
    assert [piece["trained"] for piece in pieces] == [False, True]
    assert "What is" in pieces[0]["text"] and pieces[1]["text"].startswith("0")
    assert document("tokenize", config)["documents"] == []
    place = f"{config.parent}/chat.jsonl:1"
    row = document("tokenize", config, "--at", place)
    assert (row["row"], row["left_out"], len(row["documents"])) == (place, [], 1)
    assert [piece["trained"] for piece in row["documents"][0]["pieces"]] == [False, True]


def test_a_profile_is_a_document(config: Path) -> None:
    assert document("profile", config, "--steps", 1, "--random-tokens")["step"]["tokens"] == 4 * 2 * 32


def test_all_problems_of_a_config_are_told_each_with_its_remedy(config: Path) -> None:
    told = document("plan", config, "--set", "lerning_rate=1", "--set", "sequence_len=x", status=2)["error"]
    assert (told["type"], told["exit_status"]) == ("ConfigError", 2)
    assert [(p["problem"].partition("run.yaml: ")[2], p["remedy"]) for p in told["problems"]] == [
        ("lerning_rate: unknown key", "did you mean learning_rate?"),
        ("sequence_len: must be a whole number (got 'x')", None),
    ]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["plan", "run.yaml", "--colour"], "No such option: --colour"),
        (["plan"], "No config file"),
        (["plan", "none.yaml"], "none.yaml"),
        (["plan", "run.yaml", "--listing"], "--json and --listing: a listing is text of one plan"),
        (["merge", "nowhere", "out"], "nowhere"),
    ],
)
def test_wrong_arguments_are_a_document_too(
    arguments: list[str], problem: str, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(config.parent)
    told = document(*arguments, status=2)["error"]
    assert told["exit_status"] == 2 and problem in told["problems"][0]["problem"]


def test_numbers_that_are_not_finite_are_null(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"loss": float("nan"), "rows": [(float("inf"), 1.5)], "path": Path("a"), "extent": Extent(2)})
    shown = json.loads(capsys.readouterr().out)
    assert (shown["loss"], shown["rows"], shown["path"]) == (None, [[None, 1.5]], "a")
    assert shown["extent"]["rows"] == 2


def test_a_message_without_a_remedy_has_none() -> None:
    assert failure(RunStopped("no space left"))["error"]["problems"] == [{"problem": "no space left", "remedy": None}]


# ------------------------------------------------------------------------------------------------------- exit statuses


def _all_statuses() -> set[int]:
    kinds = [found for found in vars(errors).values() if isinstance(found, type) and issubclass(found, SurogateError)]
    assert len(kinds) > 5
    signalled = {signals.INTERRUPTED, signals.TERMINATED, signals.HUNG_UP}
    return {0, 1, 2, command_group.BROKEN_PIPE, *signalled, *(kind.exit_code for kind in kinds)}


def test_every_exit_status_is_in_the_table() -> None:
    table = (ROOT / "docs/faq.md").read_text().partition("| code | meaning |")[2].partition("\n\n")[0]
    listed = [int(code) for cell in re.findall(r"^\| ([\d, ]+) \|", table, re.M) for code in cell.split(", ")]
    assert sorted(listed) == sorted(_all_statuses())


def _raising(error: BaseException) -> Callable[..., Any]:
    def load(*given: Any, **named: Any) -> Any:
        raise error

    return load


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("x"), 2),
        (PluginError("x"), 2),
        (RunStopped("x"), 3),
        (RunLost("x"), 3),
        (ProgramError("x"), 1),
        (ValueError("x"), 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_ends_a_command_with_its_status(
    error: Exception, status: int, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "load", _raising(error))
    told = document("train", config, status=status)["error"]
    assert (told["type"], told["exit_status"]) == (type(error).__name__, status)


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt(), 130), (typer.Exit(7), 7)])
def test_what_ends_without_a_result_prints_no_document(
    error: BaseException, status: int, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "load", _raising(error))
    done = invoke("plan", config, "--json")
    assert (done.exit_code, done.stdout) == (status, "")


def test_the_answer_no_is_a_document_with_its_status(config: Path) -> None:
    assert document("plan", config, "--check", "--set", "device_memory_limit=1MiB", status=1)["fits"] is False
