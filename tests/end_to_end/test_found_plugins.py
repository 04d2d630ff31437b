"""No command runs Python that a YAML file names unless the user has named that YAML file on the command line.

A canary lies where a downloaded folder can put one. Every command, of core and of packages, gets that folder for each
of its arguments; a command that is new must be added to `COMMANDS`.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from end_to_end.product import Workplace, invoke

from surogate import run
from surogate.cli.external import CORE_COMMANDS, external_commands
from surogate_core.errors import ConfigError

CANARY = "open({path!r}, 'w').close()\nSUROGATE_API = {{}}\n"

COMMANDS: dict[str, Sequence[Sequence[str]]] = {
    **{name: (["{own}"], ["{own}", "--set", "model={folder}"]) for name in ("plan", "tokenize", "verify", "profile")},
    **{
        name: (
            ["{own}", "--set", "model={folder}/adapter"],
            ["{own}", "--set", "lora=true", "--set", "adapter_path={folder}/adapter", "--set", "max_steps=1"],
            ["{own}", "--set", "resume_from_checkpoint={folder}"],
            ["{own}", "--set", "output_dir={folder}"],
        )
        for name in ("train", "pt", "sft")
    },
    "export": (["{folder}", "{new}"], ["{folder}/adapter", "{new}"]),
    "merge": (
        ["{folder}/adapter", "{new}"],
        ["{folder}/adapter", "{new}", "--adapter", "canary"],
        ["{folder}", "{new}"],
        ["{folder}/adapter", "{new}", "--base", "{folder}"],
    ),
    "quantize": (["{folder}", "{new}", "--set", "qlora_bnb=true"],),
    "report": (["{folder}"], ["{folder}", "--html", "{new}"]),
    "plugins": ([],),
    "schema": ([],),
    "doctor": ([],),
    "convert": (["{folder}/run.yaml"], ["{folder}"]),
    "docs": ([], ["{folder}"]),
    "generate": (
        ["{folder}/adapter", "--prompt", "a", "--max-new-tokens", "1"],
        ["{folder}", "--prompt", "a", "--max-new-tokens", "1"],
    ),
    "chat": (["{folder}/adapter"], ["{folder}"]),
    "serve": (),
    "new": (["adapter", "{folder}"],),
    "watch": (["{folder}", "--once"], ["{folder}/adapter", "--once"]),
    "check-serving": (
        ["http://127.0.0.1:9", "--run", "{folder}", "--timeout", "0.2"],
        ["http://127.0.0.1:9", "--run", "{folder}/adapter", "--timeout", "0.2"],
    ),
    "plugins test": (),  # its argument is what runs
    "plugins trace": (["{own}"],),
}
"""{command: lists of its arguments}. own: a config of the user; folder: what was downloaded; new: no folder yet."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the output folder of a finished run of LoRA."""
    from end_to_end.product import make_workplace

    root = tmp_path_factory.mktemp("found")
    base = make_workplace(root, max_steps=1, warmup_steps=0, eval_steps=0, save_steps=0, output_dir=str(root / "base"))
    run.train(run.load(base.write()), notice=lambda line: None)
    keys = {"model": str(root / "base"), "from_scratch": False, "lora": True, "output_dir": str(root / "out")}
    run.train(run.load(base.write(**keys)), notice=lambda line: None)
    return root / "out"


@pytest.fixture
def planted(trained: Path, here: Workplace, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Return a copy of the output, whose run.yaml files name a Python file of it, and what that file would write."""
    folder, canary = Path(shutil.copytree(trained, here.root / "downloaded")), here.root / "EXECUTED"
    (folder / "evil.py").write_text(CANARY.format(path=str(canary)))
    monkeypatch.setenv("PWD", str(here.root))
    keys = yaml.safe_load((folder / "run.yaml").read_text())
    named = ["evil.py", "$PWD/downloaded/evil.py", "downloaded/evil.py", str(folder / "evil.py")]
    for place in (folder, folder / "adapter"):
        text = yaml.safe_dump({**keys, "plugins": named})
        (place / "run.yaml").write_text("# surogate-core 0\n" + text)
    return folder, canary


def test_every_command_is_tried() -> None:
    known = {*CORE_COMMANDS, *external_commands()}
    assert known <= COMMANDS.keys(), f"add {sorted(known - COMMANDS.keys())} to COMMANDS, with a folder for each path"


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_imports_what_a_downloaded_folder_names(
    planted: tuple[Path, Path], here: Workplace, name: str
) -> None:
    if name not in {*CORE_COMMANDS, *external_commands()}:
        pytest.skip("is not installed")
    folder, canary = planted
    for number, words in enumerate(COMMANDS[name]):
        own = here.write(max_steps=1, warmup_steps=0, eval_steps=0, save_steps=0)
        given = {"own": str(own), "folder": str(folder), "new": str(here.root / f"new-{number}")}
        done = invoke(*name.split(), *(word.format(**given) for word in words))
        assert not canary.exists(), (words, done.stdout, done.stderr)


def test_the_canary_runs_where_the_user_names_the_config(planted: tuple[Path, Path], here: Workplace) -> None:
    folder, canary = planted
    keys = yaml.safe_load((folder / "run.yaml").read_text())
    named = here.root / "named.yaml"
    named.write_text(yaml.safe_dump({**keys, "plugins": ["downloaded/evil.py"]}))
    invoke("merge", folder / "adapter", here.root / "new", "--config", named)
    assert canary.exists()


def test_an_adapter_of_an_unknown_kind_is_refused_with_the_plugin_and_the_flag(
    planted: tuple[Path, Path], here: Workplace
) -> None:
    folder, canary = planted
    config = folder / "adapter/adapter_config.json"
    config.write_text(config.read_text().replace('"LORA"', '"UNHEARD"'))
    with pytest.raises(ConfigError) as refused:
        run.merge(folder / "adapter", here.root / "new")
    said = str(refused.value)
    assert "no installed adapter reads it" in said and "evil.py" in said
    assert f"--config {folder}/adapter/run.yaml" in said
    assert not canary.exists() and not (here.root / "new").exists()
