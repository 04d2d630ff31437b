"""A server is compared with the output of a run; each planted fault is named, with a remedy."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import safetensors.torch
import tokenizers
import torch
import yaml
from end_to_end.product import Workplace, environment, invoke, make_workplace

from surogate import run


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for their module
    spec.loader.exec_module(module)
    return module


served_model: Any = _module(Path(__file__).parent / "served_model.py")
Behaviour, load, serving = served_model.Behaviour, served_model.load, served_model.serving
ServedModel = Any

TEMPLATE = (
    "{{- bos_token }}{%- if style is defined %}{{- style + '\n' }}{%- endif %}"
    "{%- if style == 'dated' %}{{- (date_string or '01 Jan 2024') + '\n' }}{%- endif %}"
    "{%- if tools %}{{- '<|im_start|>tools\n' + "
    "((tools if style == 'whole' else tools | map(attribute='function') | list) | tojson) "
    "+ '<|im_end|>\n' }}{%- endif %}"
    "{%- for m in messages if m.role != 'system' or style != 'plain' %}"
    "{{- '<|im_start|>' + m.role + '\n' + (m.content or '') }}"
    "{%- for c in m.tool_calls or [] %}{{- c.function.name + (c.function.arguments | tojson) }}{%- endfor %}"
    "{{- '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
WEATHER = {"name": "weather", "description": "Wéather", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": WEATHER}]
CALL = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln", "days": 2}}}


def rows() -> list[dict[str, Any]]:
    """Conversations of one turn, of two with a system prompt, and with a call."""
    found: list[dict[str, Any]] = []
    for n in range(8):
        turn = [
            {"role": "user", "content": f"  Say {n}, naïve"},
            {"role": "assistant", "content": f"\n\n{n} crêpes 🙂"},
        ]
        found.append({"messages": turn})
        found.append({"messages": [{"role": "system", "content": "Be brief."}, *turn, *turn]})
        calls = {"role": "assistant", "content": "", "tool_calls": [CALL]}
        messages = [turn[0], calls, {"role": "tool", "content": "{}", "tool_call_id": "a"}, turn[1]]
        found.append({"messages": messages, "tools": TOOLS})
    return found


def make(root: Path, **changes: Any) -> Workplace:
    """A workplace with a model whose turns end with a token of their own, and with chats."""
    here = make_workplace(root)
    model = root / "model"
    backend = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|begin|>"])
    backend.save(str(model / "tokenizer.json"))
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**settings, "bos_token": "<|begin|>"}))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": 2112, "max_position_embeddings": 256}))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    for name in ("train", "held_out"):
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    entry = {"type": "conversation", "tools_field": "tools"}
    keys = {
        "datasets": [{"path": str(root / "train.jsonl"), **entry}],
        "validation_datasets": [{"path": str(root / "held_out.jsonl"), **entry}],
        "validation_split_ratio": 0,
        "sequence_len": 256,
        "max_steps": 3,
        "warmup_steps": 0,
        "eval_steps": 0,
        "per_device_train_batch_size": 1,
    }
    return replace(here, config={**here.config, **keys, **changes})


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("user")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(root).items():
            patch.setenv(name, value)
        patch.delenv("SUROGATE_PLUGINS", raising=False)
        patch.delenv("SUROGATE_SERVING_API_KEY", raising=False)
        yield root


@pytest.fixture(scope="module")
def out(user: Path) -> Path:
    """The output of a run with all weights."""
    here = make(user / "full", learning_rate=0.02)
    run.train(run.load(here.write()), notice=lambda line: None)
    return here.out


@pytest.fixture(scope="module")
def loaded(out: Path) -> ServedModel:
    return load(out)


@pytest.fixture
def good(loaded: ServedModel) -> ServedModel:
    return replace(loaded, model=deepcopy(loaded.model), stops={*loaded.stops}, drops=set())


def check(out: Path, behaviour: Any, *more: str | Path, at: str | Path | None = None) -> tuple[int, dict[str, Any]]:
    """Return the exit status and the JSON of a check. at: a folder, in place of a server's address."""
    given = behaviour if hasattr(behaviour, "models") else Behaviour({"mine": behaviour})
    with serving(given) as url:
        done = invoke("check-serving", at or url, "--run", out, "--json", *more)
    found = json.loads(done.stdout)
    assert "error" not in found, found
    return done.returncode, found


PROGRAMS = {"vllm": "vLLM", "sglang": "SGLang", "llamacpp": "llama-server", "files": "transformers"}
everywhere = pytest.mark.parametrize("speaks", PROGRAMS)


def check_as(speaks: str, out: Path, served: ServedModel, into: Path, *more: str | Path) -> tuple[int, dict[str, Any]]:
    """Return what a check of a program finds: of a server, or of files with the same faults."""
    if speaks != "files":
        return check(out, Behaviour({"mine": served}, speaks=speaks), *more)
    return check(out, served, *more, at=written(served, out, into / "served"))


def written(served: ServedModel, out: Path, folder: Path) -> Path:
    """Return a folder with a served model and its faults."""
    served.model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(out / name, folder / name)
    template = TEMPLATE if served.template is None else served.template
    if "tools" in served.drops:
        template = template.replace("if tools", "if false")
    if "chat_template_kwargs" in served.drops:
        template = template.replace("style is defined", "false")
    if served.bos_twice is not None:
        template = "{{- bos_token }}" + template
    (folder / "chat_template.jinja").write_text(template)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [*served.stops]}))
    return folder


def with_style(out: Path, style: str, into: Path) -> Path:
    """Return the config of a run whose conversations set a variable of the chat template."""
    keys = yaml.safe_load((out / "run.yaml").read_text())
    keys["validation_datasets"][0]["chat_template_kwargs"] = {"style": style}
    (into / "run.yaml").write_text(yaml.safe_dump(keys))
    return into / "run.yaml"


def refused(out: Path, behaviour: Any, *more: str | Path) -> str:
    """Return the message of a check that cannot be made."""
    with serving(behaviour) as url:
        done = invoke("check-serving", url, "--run", out, *more)
    assert done.returncode == 2 and done.stdout == ""
    return done.stderr.replace(url, "URL")


@pytest.mark.parametrize(("speaks", "conversations"), [("vllm", 16), ("sglang", 6), ("llamacpp", 6), ("files", 6)])
def test_what_a_run_has_written_is_equal_when_served(
    out: Path, good: ServedModel, speaks: str, conversations: int, tmp_path: Path
) -> None:
    more = () if conversations == 16 else ("--conversations", str(conversations))
    status, found = check_as(speaks, out, good, tmp_path, *more)
    named = "served" if speaks == "files" else "mine"
    assert (status, found["equal"], found["server"]) == (0, True, {"program": PROGRAMS[speaks], "model": named})
    tokens, log_probs, stops = (found["checks"][name] for name in ("tokens", "log_probs", "stops"))
    assert tokens["conversations"] == conversations and tokens["texts"] > 2 * conversations
    assert tokens["in_front_of_trained"] >= conversations and tokens["differ"] == tokens["not_compared"] == 0
    largest = 1e-3 if speaks == "llamacpp" else 1e-4  # sums in F16
    assert log_probs["rms"] < 1e-6 and 1e-5 < log_probs["bound"] < largest and log_probs["kl"] < 1e-6
    assert log_probs["tokens"] > 15 * conversations
    assert (log_probs["not_compared"] > 0) == (speaks == "llamacpp")
    assert log_probs["same_best"] == 1 and log_probs["loss_trained"] == pytest.approx(
        log_probs["loss_served"], abs=1e-6
    )
    assert len(stops["ends"]) == 1 and stops["goes_on_after"] == []


def test_the_text_says_each_check_in_a_line(out: Path, good: ServedModel) -> None:
    with serving(Behaviour({"mine": good})) as url:
        done = invoke("check-serving", f"{url}/v1/", "--run", out, "--conversations", "3")
    assert done.returncode == 0
    first, *lines = done.stdout.splitlines()
    assert first == "vLLM, model mine"
    picture = [line for line in lines if line.startswith(" ")]
    lines = [line for line in lines if line not in picture]
    assert [line.split()[:2] for line in lines] == [["equal", name] for name in ("tokens", "log_probs", "stops")]
    assert "3 conversations" in lines[0] and "<|im_end|>" in lines[2]
    counts = [int(line.split()[2]) for line in picture]
    assert f"{sum(counts)} trained tokens" in lines[1]
    assert picture[-1].split()[1] == "1e-04" and picture[-1].endswith("<- the bound is here")
    assert [line.count("#") == 32 for line in picture].count(True) == 1


def plant_template(served: ServedModel) -> None:
    served.template = TEMPLATE.replace("'<|im_start|>' + m.role", "'<|im_start|>' + m.role + ':'")


def plant_no_end(served: ServedModel) -> None:
    served.template = TEMPLATE.replace("{{- '<|im_end|>\n' }}{%- endfor", "{{- '\n' }}{%- endfor")


def plant_bos_twice(served: ServedModel) -> None:
    served.bos_twice = served.tokenizer.bos_token_id


def plant_no_bos(served: ServedModel) -> None:
    served.template = TEMPLATE.replace("{{- bos_token }}", "")


def plant_no_tools(served: ServedModel) -> None:
    served.drops.add("tools")


@everywhere
@pytest.mark.parametrize(
    ("plant", "fault", "remedy"),
    [
        (plant_template, "another chat template", "{template}"),
        (plant_no_end, "the end of turns, <|im_end|>, is missing", "chat_template.jinja"),
        (plant_bos_twice, "<|begin|> stands twice at the beginning", "add_special_tokens"),
        (plant_no_bos, "<|begin|> is missing at the beginning", "chat_template.jinja"),
        (plant_no_tools, "the tools are left out", "drops `tools`"),
    ],
)
def test_other_tokens_are_named_and_shown_in_both_texts(
    out: Path, good: ServedModel, speaks: str, tmp_path: Path, plant: Any, fault: str, remedy: str
) -> None:
    plant(good)
    status, found = check_as(speaks, out, good, tmp_path, "--no-log-probs", "--conversations", "6")
    tokens = found["checks"]["tokens"]
    assert (status, tokens["equal"], tokens["fault"]) == (1, False, fault)
    assert remedy.format(template=WORDS[speaks]) in tokens["remedy"]
    where, trained, served = tokens["shown"]
    assert "held_out.jsonl:" in where and trained.startswith("trained ") and served.startswith("served ")
    assert trained.split(maxsplit=1)[1] != served.split(maxsplit=1)[1]
    assert found["checks"]["stops"]["equal"]


WORDS = {
    "vllm": "name it with --chat-template",
    "sglang": "name it with --chat-template",
    "llamacpp": "--jinja",
    "files": "in the folder, as chat_template.jinja",
}
"""What the remedy for another chat template says of each program."""


@pytest.mark.parametrize(
    ("speaks", "form"),
    [("vllm", '"description": null'), ("sglang", '"description": null}'), ("llamacpp", '"description": ""')],
)
def test_tools_that_a_server_fills_in_are_named(
    out: Path, good: ServedModel, tmp_path: Path, speaks: str, form: str
) -> None:
    row = rows()[2]
    function = {name: value for name, value in WEATHER.items() if name != "description"}
    (tmp_path / "rows.jsonl").write_text(json.dumps({**row, "tools": [{"type": "function", "function": function}]}))
    more = ("--rows", tmp_path / "rows.jsonl", "--no-log-probs")
    status, found = check_as(speaks, out, good, tmp_path, *more)
    tokens = found["checks"]["tokens"]
    assert (status, tokens["fault"]) == (1, "the tools are written in another form")
    assert form in tokens["remedy"] and tokens["remedy"].startswith(f"{PROGRAMS[speaks]} gives tools")


def test_a_key_that_sglang_puts_into_each_tool_is_named(out: Path, good: ServedModel, tmp_path: Path) -> None:
    config = with_style(out, "whole", tmp_path)
    status, found = check_as("sglang", out, good, tmp_path, "--config", config, "--no-log-probs")
    tokens = found["checks"]["tokens"]
    assert (status, tokens["fault"]) == (1, "the tools are written in another form")
    assert '"defer_loading": null' in tokens["remedy"] and 0 < tokens["differ"] < tokens["texts"]


@everywhere
def test_messages_that_the_served_template_refuses_are_a_difference(
    out: Path, good: ServedModel, speaks: str, tmp_path: Path
) -> None:
    good.template = "{{ raise_exception('roles must alternate') }}" if speaks == "files" else ""
    status, found = check_as(speaks, out, good, tmp_path, "--no-log-probs")
    tokens = found["checks"]["tokens"]
    assert (status, tokens["equal"]) == (1, False)
    assert "refuses the conversation" in tokens["said"] and "roles must alternate" in tokens["remedy"]


@pytest.mark.parametrize(("speaks", "share"), [("vllm", 0.01), ("sglang", 0.01), ("llamacpp", 0.03), ("files", 0.01)])
def test_one_percent_of_one_matrix_is_found_although_the_loss_hardly_moves(
    out: Path, good: ServedModel, speaks: str, share: float, tmp_path: Path
) -> None:
    """Of llama-server 3 %: it adds in F16, whose rounding hides less."""
    with torch.no_grad():
        weight = good.model.model.layers[0].mlp.down_proj.weight
        noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
        weight += share * weight.square().mean().sqrt() * noise
    status, found = check_as(speaks, out, good, tmp_path, "--conversations", "6")
    log_probs = found["checks"]["log_probs"]
    assert (status, log_probs["fault"]) == (1, "other weights")
    assert log_probs["rms"] > log_probs["bound"] and "surogate merge" in log_probs["remedy"]
    assert abs(log_probs["loss_trained"] - log_probs["loss_served"]) < 0.01
    assert found["checks"]["tokens"]["equal"] and found["checks"]["stops"]["equal"]


@pytest.mark.parametrize("speaks", ["vllm", "sglang", "files"])
def test_another_rounding_is_named_and_can_be_accepted(out: Path, speaks: str, tmp_path: Path) -> None:
    served = load(out, torch.bfloat16)
    status, found = check_as(speaks, out, served, tmp_path, "--conversations", "6")
    assert (status, found["checks"]["log_probs"]["fault"]) == (1, "rounded to bfloat16")
    assert "--format bf16" in found["checks"]["log_probs"]["remedy"]
    assert check_as(speaks, out, served, tmp_path, "--format", "bf16", "--conversations", "6")[0] == 0


def test_the_type_of_a_gguf_is_named_and_can_be_accepted(out: Path) -> None:
    served = load(out)
    with torch.no_grad():
        for weight in served.model.parameters():
            if weight.ndim > 1:  # vectors stay as they are in a GGUF
                blocks = weight.reshape(-1, 32)
                scale = blocks.abs().amax(-1, keepdim=True) / 127
                weight.copy_(((blocks / scale).round() * scale).reshape(weight.shape))
    behaviour = Behaviour({"mine": served}, speaks="llamacpp", form="mostly Q8_0")
    status, found = check(out, behaviour, "--conversations", "4")
    assert (status, found["checks"]["log_probs"]["fault"]) == (1, "rounded to gguf:q8_0, as the server says")
    assert "--format gguf:q8_0" in found["checks"]["log_probs"]["remedy"]
    assert check(out, behaviour, "--format", "gguf:q8_0", "--conversations", "4")[0] == 0


@everywhere
def test_an_end_of_turn_at_which_the_server_goes_on_is_named(
    out: Path, good: ServedModel, speaks: str, tmp_path: Path
) -> None:
    good.stops = {0}
    status, found = check_as(speaks, out, good, tmp_path, "--no-log-probs", "--conversations", "6")
    stops = found["checks"]["stops"]
    (end,) = stops["ends"]
    assert (status, stops["fault"], stops["goes_on_after"]) == (1, "missing end token", [end])
    assert f"Add {end} to eos_token_id of generation_config.json" in stops["remedy"]


def test_fewer_likeliest_tokens_than_asked_for_are_said_and_leave_no_kl(out: Path, good: ServedModel) -> None:
    with serving(Behaviour({"mine": good}, top=5)) as url:
        done = invoke("check-serving", url, "--run", out, "--json")
    assert done.returncode == 0 and "so there is no KL" in done.stderr
    assert json.loads(done.stdout)["checks"]["log_probs"]["kl"] is None


@pytest.mark.parametrize(
    ("style", "fault", "remedy"),
    [
        ("dated", "the date of today is written", "--chat-template-kwargs"),
        ("plain", "the system message is put into the next one", "in front of the message of the user"),
    ],
)
def test_what_a_llama_server_gives_to_a_template_of_its_own_is_named(
    out: Path, good: ServedModel, tmp_path: Path, style: str, fault: str, remedy: str
) -> None:
    config = with_style(out, style, tmp_path)
    more = ("--config", config, "--no-log-probs", "--conversations", "6")
    status, found = check_as("llamacpp", out, good, tmp_path, *more)
    tokens = found["checks"]["tokens"]
    assert (status, tokens["fault"]) == (1, fault) and remedy in tokens["remedy"]
    assert check_as("sglang", out, good, tmp_path, *more)[0] == 0


@everywhere
def test_rows_of_a_file_and_variables_of_a_template(out: Path, good: ServedModel, speaks: str, tmp_path: Path) -> None:
    row = tmp_path / "rows.jsonl"
    row.write_text(json.dumps(rows()[0]))
    more = ("--rows", row, "--no-log-probs")
    status, found = check_as(speaks, out, good, tmp_path, *more)
    assert (status, found["checks"]["tokens"]["conversations"]) == (0, 1)
    config = with_style(out, "short", tmp_path)
    more = ("--config", config, "--no-log-probs", "--conversations", "4")
    status, found = check_as(speaks, out, good, tmp_path, *more)
    assert (status, found["checks"]["tokens"]["equal"]) == (0, True)
    good.drops.add("chat_template_kwargs")
    status, found = check_as(speaks, out, good, tmp_path, *more)
    assert (status, found["checks"]["tokens"]["fault"]) == (1, "chat_template_kwargs (style) are not applied")


@pytest.fixture(scope="module")
def adapter(user: Path) -> tuple[Path, Path]:
    """The output of a run with an adapter, and the merged model."""
    here = make(user / "lora", learning_rate=0.05, lora=True)
    base = make(user / "base")
    run.train(run.load(base.write()), notice=lambda line: None)
    run.train(run.load(here.write(model=str(base.out), from_scratch=False)), notice=lambda line: None)
    merged = user / "merged"
    run.merge(here.out / "adapter", merged, notice=lambda line: None)
    return here.out, merged


servers = pytest.mark.parametrize("speaks", ["vllm", "sglang", "llamacpp"])


@servers
def test_an_adapter_by_name_is_compared_with_the_merged_model(
    user: Path, adapter: tuple[Path, Path], speaks: str
) -> None:
    output, merged = adapter
    base, with_adapter = load(user / "base/out"), load(merged)
    with_adapter.parent = "base"
    few = ("--adapter", "mine", "--conversations", "2")

    def served(mine: ServedModel) -> Any:
        return Behaviour({"base": base, "mine": mine}, speaks=speaks)

    status, found = check(output, served(with_adapter), *few)
    assert (status, found["server"]["model"]) == (0, "mine")
    assert found["checks"]["log_probs"]["equal"] and found["checks"]["adapter"]["rms"] > 1e-3

    not_applied = replace(base, parent="base", stops=with_adapter.stops)
    status, found = check(output, served(not_applied), *few)
    assert status == 1
    assert [found["checks"][name]["fault"] for name in ("log_probs", "adapter")] == ["the adapter is not applied"] * 2

    other = deepcopy(with_adapter)
    with torch.no_grad():
        other.model.model.layers[0].self_attn.o_proj.weight *= 2
    status, found = check(output, served(other), *few)
    assert (status, found["checks"]["log_probs"]["fault"]) == (1, "another adapter, or another base")
    said = refused(output, Behaviour({"base": base}, speaks=speaks), "--adapter", "mine")
    hint = {"vllm": "--lora-modules mine=", "sglang": "--lora-paths mine=", "llamacpp": "--lora mine.gguf"}[speaks]
    assert "the server has no such adapter; it serves base" in said and hint in said


def test_an_adapter_in_files_is_loaded_by_peft_and_compared(
    adapter: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, _ = adapter
    served = shutil.copytree(output / "adapter", tmp_path / "mine")
    status, found = check(output, None, "--conversations", "3", at=served)
    assert (status, found["server"]) == (0, {"program": "PEFT", "model": "mine"})
    assert found["checks"]["log_probs"]["equal"] and found["checks"]["adapter"]["rms"] > 1e-3
    weights = safetensors.torch.load_file(served / "adapter_model.safetensors")
    changed = {name: value * 2 if "lora_B" in name else value for name, value in weights.items()}
    safetensors.torch.save_file(changed, served / "adapter_model.safetensors", {"format": "pt"})
    status, found = check(output, None, "--conversations", "3", at=served)
    assert (status, found["checks"]["log_probs"]["fault"]) == (1, "another adapter, or another base")
    monkeypatch.setitem(sys.modules, "peft", None)
    done = invoke("check-serving", served, "--run", output)
    assert done.returncode == 2 and "loaded by PEFT, which is not installed. pip install peft" in done.stderr


def test_an_adapter_that_a_llama_server_applies_by_default_is_compared(user: Path, adapter: tuple[Path, Path]) -> None:
    output, merged = adapter
    base, with_adapter = load(user / "base/out"), load(merged)
    with_adapter.parent = "base"
    behaviour = Behaviour({"base": base, "mine": with_adapter}, speaks="llamacpp")
    status, found = check(output, behaviour, "--conversations", "4")
    assert (status, found["server"]["model"], "adapter" in found["checks"]) == (0, "base", False)


def test_what_an_old_sglang_does_not_render_is_skipped_by_name(out: Path, good: ServedModel) -> None:
    behaviour = Behaviour({"mine": good}, speaks="sglang", old=True)
    status, found = check(out, behaviour, "--no-log-probs")
    tokens = found["checks"]["tokens"]
    assert (status, found["equal"], tokens["equal"], found["checks"]["stops"]["equal"]) == (0, True, None, True)
    assert "renders no messages at /tokenize; 0.5.23 does" in tokens["said"]
    with serving(behaviour) as url:
        done = invoke("check-serving", url, "--run", out, "--no-log-probs")
    assert [line.split()[:2] for line in done.stdout.splitlines()[1:]] == [["skipped", "tokens"], ["equal", "stops"]]
    good.stops = {0}
    assert check(out, behaviour, "--no-log-probs")[0] == 1


@pytest.mark.parametrize("speaks", ["vllm", "sglang", "llamacpp"])
def test_a_server_behind_a_name_of_its_own_is_known_by_its_routes(out: Path, good: ServedModel, speaks: str) -> None:
    behaviour = Behaviour({"mine": good}, speaks=speaks, owned_by="acme")
    status, found = check(out, behaviour, "--no-log-probs", "--conversations", "2")
    assert (status, found["server"]["program"]) == (0, PROGRAMS[speaks])


def test_a_server_of_another_program_is_an_error_that_lists_what_was_asked(out: Path, good: ServedModel) -> None:
    behaviour = Behaviour({"mine": good}, speaks="other", owned_by="\x1b[31mother")
    said = refused(out, behaviour)
    assert r"/v1/models: models of \x1b[31mother; /props: status 404; /model_info: no is_generation" in said
    assert "answers as none of vLLM, SGLang and llama-server" in said and "/version: status 404" in said


@servers
def test_a_server_that_is_busy_is_asked_again(
    out: Path, good: ServedModel, speaks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surogate_serving.connection._PAUSE", 0.01)
    behaviour = Behaviour({"mine": good}, speaks=speaks, busy=3)
    assert check(out, behaviour, "--no-log-probs", "--conversations", "2")[0] == 0
    behaviour.busy = 10**6
    said = refused(out, behaviour, "--no-log-probs", "--conversations", "2", "--timeout", "0.1")
    assert "no server answers after 0 s (status 503)" in said


def test_a_folder_that_is_no_model_is_an_error(out: Path, adapter: tuple[Path, Path], tmp_path: Path) -> None:
    def said(folder: Path) -> str:
        done = invoke("check-serving", folder, "--run", out)
        assert done.returncode == 2 and done.stdout == ""
        return done.stderr

    assert "holds no config.json and no adapter_config.json" in said(tmp_path)
    mine = shutil.copytree(adapter[0] / "adapter", tmp_path / "mine")
    keys = json.loads((mine / "adapter_config.json").read_text())
    (mine / "adapter_config.json").write_text(json.dumps({**keys, "base_model_name_or_path": "/nowhere"}))
    assert "its base /nowhere is no folder. Name one with --base." in said(mine)
    (mine / "adapter_config.json").write_text("{}")
    assert "names no base_model_name_or_path" in said(mine)
    broken = shutil.copytree(out, tmp_path / "broken", ignore=shutil.ignore_patterns("checkpoint*"))
    (broken / "model.safetensors").write_bytes(b"no weights")
    assert "does not load in transformers" in said(broken) and "Train or export it again" in said(broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "modelopt"}}))
    assert "quantized (modelopt), of which transformers reads some formats only" in said(broken)


@pytest.mark.parametrize(
    ("changes", "more", "said"),
    [
        ({}, ["--name", "other"], "--name other: the server has no such model; it serves mine, too."),
        ({}, [], "serves mine, too. Choose one with --name."),
        ({"answer": lambda route: b"<html>"}, [], "the answer is no JSON: '<html>'"),
        ({"answer": lambda route: b"[" * 100_000}, [], "the answer is no JSON"),
        ({"answer": lambda route: b"{}"}, [], "has no data: '{}'"),
        ({"answer": lambda route: b"http://127.0.0.1:9/x"}, [], "is redirected, which is not followed"),
        ({"answer": lambda route: b"{}" if route == "/tokenize" else None}, ["--name", "mine"], "has no tokens: '{}'"),
        ({}, ["--format", "other"], "--format other: no bound is known for it. Known: fp32, bf16"),
        ({}, ["--timeout", "0"], "--timeout 0.0: is no time."),
        ({}, ["--adapter", "mine", "--no-log-probs"], "--adapter and --no-log-probs"),
    ],
)
def test_what_cannot_be_compared_is_an_error_in_the_input(
    out: Path, good: ServedModel, changes: dict[str, Any], more: list[str], said: str
) -> None:
    assert said in refused(out, Behaviour({"mine": good, "too": good}, **changes), *more)


@pytest.mark.parametrize(
    ("speaks", "route", "answer", "said"),
    [
        ("sglang", "/tokenize", b'{"tokens": ["a"]}', "has tokens \"['a']\", not token ids"),
        ("sglang", "/generate", b"{}", "has no meta_info: '{}'"),
        ("sglang", "/generate", b'{"meta_info": {"input_token_logprobs": [], "input_top_logprobs": []}}', "of the"),
        ("llamacpp", "/apply-template", b"[]", "has no prompt: '[]'"),
        ("llamacpp", "/completion", b"7", "/completion: the answer is '7', no text"),
        ("llamacpp", "/completion", b'{"content": "a"}', "has no completion_probabilities.0"),
        ("llamacpp", "/completion", b'{"completion_probabilities": [{"id": -1}]}', "wrote token -1 in place of"),
        ("llamacpp", "/lora-adapters", b"{}", "/lora-adapters: the answer is '{}', no list"),
        ("llamacpp", "/lora-adapters", b'[{"id": "a", "path": "b"}]', "has 'a' where a whole number belongs"),
        ("vllm", "/v1/completions", b'{"choices": [{"prompt_logprobs": 1}]}', "has no prompt_logprobs of the"),
    ],
)
def test_an_answer_of_another_form_is_an_error(
    out: Path, good: ServedModel, speaks: str, route: str, answer: bytes, said: str
) -> None:
    behaviour = Behaviour({"mine": good}, speaks=speaks, answer=lambda asked: answer if asked == route else None)
    assert said in refused(out, behaviour, "--conversations", "1")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://127.0.0.1:9", "no server answers after 0 s (Connection refused). Start it"),
        ("127.0.0.1:8000", "is no address of a server. Write http://127.0.0.1:8000, or name a folder"),
        ("http://127.0.0.1:99999", "Port out of range"),
        ("http://me:hidden@127.0.0.1", "the URL has a user or a password"),
        ("http://127.0.0.1/?a=1", "leave out what follows the path"),
    ],
)
def test_an_address_without_a_server_is_an_error(out: Path, url: str, said: str) -> None:
    done = invoke("check-serving", url, "--run", out, "--timeout", "0.5")
    assert done.returncode == 2 and said in done.stderr and "hidden" not in done.stderr


def test_a_folder_without_a_run_needs_rows(out: Path, good: ServedModel, tmp_path: Path) -> None:
    assert "holds no model" in refused(tmp_path, Behaviour({"mine": good}))
    model = shutil.copytree(out, tmp_path / "a/model", ignore=shutil.ignore_patterns("run.yaml"))
    said = refused(model, Behaviour({"mine": good}))
    assert "has no run.yaml that names data. Give conversations with --rows." in said
    assert check(model, good, "--rows", out.parent / "train.jsonl", "--no-log-probs")[0] == 0
    (tmp_path / "none.jsonl").write_text('{"text": "a"}\n')
    assert "messages" in refused(out, Behaviour({"mine": good}), "--rows", tmp_path / "none.jsonl")


def test_a_server_that_starts_is_waited_for(out: Path, good: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surogate_serving.connection._PAUSE", 0.01)
    behaviour = Behaviour({"mine": good}, unready=3)
    with serving(behaviour) as url:
        done = invoke("check-serving", url, "--run", out, "--no-log-probs")
    assert done.returncode == 0 and "does not answer yet (status 503); waiting up to 120 s" in done.stderr
    assert behaviour.asked[:4] == ["/v1/models"] * 4


def test_the_key_comes_from_the_environment_and_is_never_printed(
    out: Path, good: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    behaviour = Behaviour({"mine": good}, key="secret-one")
    assert "the server wants a key. Set SUROGATE_SERVING_API_KEY" in refused(out, behaviour)
    monkeypatch.setenv("SUROGATE_SERVING_API_KEY", "secret-two")
    said = refused(out, behaviour)
    assert "the key in it is not the server's" in said and "secret" not in said
    monkeypatch.setenv("SUROGATE_SERVING_API_KEY", "secret-one")
    assert check(out, behaviour, "--no-log-probs")[0] == 0
    behaviour.answer = lambda route: b"secret-one"
    said = refused(out, behaviour)
    assert "***" in said and "secret-one" not in said
