"""Preference losses beside TRL and beside float64: one step, then 20, on tiny models of three families, fp32 on a CPU.

    python benchmarks/preference_parity.py work --trl ENVIRONMENT/bin/python

ENVIRONMENT has TRL 1.16 with torch, transformers and PEFT; nothing of Surogate is imported there. Both sides train as
their users do, from the same files: `run.train` on rows of packed documents, and TRL's trainers on padded batches. The
adapter is not zero, so the reference differs from the first step on. Every step takes all of the data, so its order is
no difference. A third side is written out here: plain torch in float64.

Gradients are those of the first step; ours are read from the first moments of its checkpoint, (1 - beta1) g. An error
is a difference over a size: of losses the first one, of rewards the largest, of a gradient its 2-norm, of a tensor
after 20 steps how far it has moved. One step must agree to 1e-5. How far 20 steps may drift is what float64 shows if
each gradient of each step gets a random error of 1e-5 of its norm; to that the losses add the 1e-5 of one step.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16},
}
CONFIG: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "dtype": "float32",
}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RANK, ALPHA = 4, 8
STEPS, LR = 20, 1e-3
PAIRS = 8
TOLERANCE = 1e-5


class Example(NamedTuple):
    """Tokens of a prompt and of its answers, each with an end; whether an answer that is alone is desirable."""

    prompt: list[int]
    answers: list[list[int]]
    desirable: bool


REWARDS = {name: name for name in ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")}


@dataclass(frozen=True)
class Case:
    """A loss: our keys, TRL's trainer and its settings, the data, and the examples of TRL's micro-batches."""

    keys: dict[str, Any]
    trainer: str
    settings: dict[str, Any]
    data: str = "pairs"
    micro_batch: int = PAIRS
    full: bool = False
    agrees: bool = True
    names: dict[str, str] = field(default_factory=lambda: REWARDS)


DPO = {"loss": "dpo", "dpo_beta": 0.3}
SIMPO = {"loss": "simpo", "simpo_beta": 2.0, "simpo_gamma": 0.7}
ORPO = {"loss": "orpo", "orpo_beta": 0.4}
KTO = {"loss": "kto", "kto_beta": 0.3, "kto_desirable_weight": 1.5, "kto_undesirable_weight": 0.5}
THEIR_KTO = {"beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.5}
CASES = {
    "sigmoid": Case(DPO, "dpo", {"beta": 0.3, "loss_type": ["sigmoid"]}),
    "hinge": Case(DPO | {"dpo_loss": "hinge"}, "dpo", {"beta": 0.3, "loss_type": ["hinge"]}),
    # TRL reports rewards of sums for every loss, we report those of the means that IPO compares
    "ipo": Case(DPO | {"dpo_loss": "ipo"}, "dpo", {"beta": 0.3, "loss_type": ["ipo"]}),
    # TRL's sigmoid has no label smoothing any more; its aot sorts the pairs of a micro-batch, of which there is one
    "smoothed": Case(
        DPO | {"dpo_label_smoothing": 0.2},
        "dpo",
        {"beta": 0.3, "loss_type": ["aot"], "label_smoothing": 0.2},
        micro_batch=1,
    ),
    "simpo": Case(SIMPO, "cpo", {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0, "simpo_gamma": 0.7}),
    # with one token as the prompt and one pair a micro-batch, TRL's cross-entropy is that of the paper
    "orpo, prompt of one token": Case(ORPO, "orpo", {"beta": 0.4}, data="short", micro_batch=1),
    "orpo": Case(ORPO, "orpo", {"beta": 0.4}, agrees=False),
    "kto": Case(KTO, "kto", THEIR_KTO, data="answers", names={"kl": "kl"}),
    "kto, micro-batches of 2": Case(KTO, "kto", THEIR_KTO, data="answers", micro_batch=2, agrees=False, names={}),
    "sigmoid, all weights": Case(
        DPO | {"reference": "frozen"}, "dpo", {"beta": 0.3, "loss_type": ["sigmoid"]}, full=True
    ),
    "simpo, all weights": Case(
        SIMPO, "cpo", {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0, "simpo_gamma": 0.7}, full=True
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trl", help="the interpreter of an environment with TRL")
    parser.add_argument("--side", choices=["prepare", "ours", "theirs", "exact", "compare"], help="one part alone")
    arguments = parser.parse_args(argv)
    folder: Path = arguments.folder.resolve()
    torch.set_num_threads(1)
    if arguments.side:
        return {"prepare": prepare, "ours": ours, "theirs": theirs, "exact": exact, "compare": compare}[arguments.side](
            folder
        )
    if arguments.trl is None:
        parser.error("--trl: name the interpreter of an environment with TRL")
    prepare(folder)
    ours(folder)
    subprocess.run([arguments.trl, __file__, str(folder), "--side", "theirs"], check=True)
    exact(folder)
    return compare(folder)


# ------------------------------------------------------------------------------------------------- models and data


def prepare(folder: Path) -> int:
    """Write the models, an adapter for each, and the data."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    for family, changes in FAMILIES.items():
        place = folder / family
        write_tokenizer(place / "model")
        config = {"model_type": family, **CONFIG, **changes}
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("norm.weight"):
                    parameter.add_(0.2 * torch.randn_like(parameter))
                elif name.endswith("bias"):
                    parameter.normal_(0, 0.1)
                else:
                    parameter.normal_(0, 0.1)
        model.save_pretrained(place / "model")
        (place / "model/config.json").write_text(json.dumps(config, indent=2))
        adapted = get_peft_model(
            model, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=TARGETS, task_type="CAUSAL_LM")
        )
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0, 0.1)
        adapted.save_pretrained(str(place / "adapter"))
    for name in ("pairs", "short", "answers"):
        lines = []
        for prompt, answers, desirable in examples(name):
            texts = [" " + text(answer[:-1]) for answer in answers]
            if name == "answers":
                lines.append({"prompt": text(prompt), "completion": texts[0], "label": desirable})
            else:
                lines.append({"prompt": text(prompt), "chosen": texts[0], "rejected": texts[1]})
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return 0


def examples(name: str) -> list[Example]:
    """Return prompts with their answers, of unequal lengths. Every answer ends with token 0."""
    generator = torch.Generator().manual_seed(1)

    def draw(length: int) -> list[int]:
        return torch.randint(1, int(CONFIG["vocab_size"]), (length,), generator=generator).tolist()

    found = []
    for number in range(PAIRS):
        prompt = draw(1 if name == "short" else 3 + (5 * number) % 7)
        answers = [[*draw(2 + (3 * number + 4 * side) % 9), 0] for side in range(1 if name == "answers" else 2)]
        found.append(Example(prompt, answers, number % 3 > 0))
    return found


def text(tokens: Sequence[int]) -> str:
    return " ".join(f"w{token}" for token in tokens)


def write_tokenizer(folder: Path) -> None:
    """A tokenizer with a word for each token, so that text on both sides is the same tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {"<end>": 0} | {f"w{token}": token for token in range(1, int(CONFIG["vocab_size"]))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "pad_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


# ---------------------------------------------------------------------------------------------------- the three sides


def each(folder: Path, side: str) -> Iterator[tuple[str, Case, Path, Path]]:
    for family in FAMILIES:
        for name, case in CASES.items():
            out = folder / side / family / name.replace(", ", "-").replace(" ", "_")
            out.mkdir(parents=True, exist_ok=True)
            print(f"{side}: {family}, {name}", flush=True)
            yield name, case, folder / family, out


def keep(out: Path, figures: list[dict[str, float]], gradients: dict[str, Tensor], weights: dict[str, Tensor]) -> None:
    """Write the figures of each step, the first gradients, and the last weights, by PEFT's or transformers' names."""
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    (out / "figures.json").write_text(json.dumps(figures))
    for name, tensors in (("gradients", gradients), ("weights", weights)):
        copies = {key: value.detach().contiguous().clone() for key, value in tensors.items()}
        save_file(copies, out / f"{name}.safetensors")


def short_name(name: str) -> str:
    return name.removeprefix("base_model.model.").removesuffix(".weight").removesuffix(".default")


def ours(folder: Path) -> int:
    from safetensors.torch import load_file

    from surogate import run

    for _, case, place, out in each(folder, "ours"):
        kind = "labelled" if case.data == "answers" else "preference"
        keys = {
            "model": str(place / "model"),
            "model_dtype": "fp32",
            "datasets": [
                {"path": str(folder / f"{case.data}.jsonl"), "type": kind, "text_as": "text", "prompt_field": "prompt"}
            ],
            "validation_split_ratio": 0,
            "sequence_len": 256 if case.data == "answers" else 64,  # KL moves answers on within a row
            "per_device_train_batch_size": 1,
            "optimizer": "adamw",
            "learning_rate": LR,
            "lr_scheduler_type": "constant",
            "weight_decay": 0,
            "max_grad_norm": 0,
            "verify_outputs": False,
            "logging_steps": STEPS,
            **case.keys,
        }
        if not case.full:
            keys |= {"lora": True, "lora_rank": RANK, "lora_alpha": ALPHA, "adapter_path": str(place / "adapter")}
        rows = run.tokenize(run.load(keys), notice=lambda line: None).train.n_rows
        keys["gradient_accumulation_steps"] = rows
        for steps, name in ((1, "one"), (STEPS, "all")):
            more = {
                "max_steps": steps,
                "save_steps": steps,
                "output_dir": str(out / name),
                "overwrite_output_dir": True,
            }
            loaded = run.load(keys | more)
            run.train(loaded)
        records = map(json.loads, (out / "all/metrics.jsonl").read_text().splitlines())
        figures = [{"loss": r["loss"], **r["metrics"]} for r in records if r["log"] == "step"]
        state = load_file(next((out / "one").glob("step_*/training_state/*.safetensors")))
        moments = {n.removeprefix("adamw.m."): m / (1 - 0.9) for n, m in state.items() if n.startswith("adamw.m.")}
        saved = out / ("all/model.safetensors" if case.full else "all/adapter/adapter_model.safetensors")
        gradients: dict[str, Tensor] = {}
        if case.full:
            for weight in run.plan(run.open_run(loaded), "cpu").assembly.weights:
                parts = moments[weight.param].split([t.rows[0] for t in weight.tensors])
                gradients |= {t.name: t.save(part) for t, part in zip(weight.tensors, parts, strict=True)}
        else:
            gradients = moments
        keep(
            out,
            figures,
            {short_name(n): g for n, g in gradients.items()},
            {short_name(n): w for n, w in load_file(saved).items()},
        )
    return 0


def policy(place: Path, case: Case, dtype: torch.dtype) -> Any:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(place / "model", dtype=torch.float32, attn_implementation="eager")
    if not case.full:
        model = PeftModel.from_pretrained(model, place / "adapter", is_trainable=True)
    return model.to(dtype).train()


def trained(model: Any) -> dict[str, Tensor]:
    return {short_name(n): p for n, p in model.named_parameters() if p.requires_grad}


def theirs(folder: Path) -> int:
    import datasets
    import transformers
    import trl  # type: ignore[import-not-found]
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl.experimental.cpo import CPOConfig, CPOTrainer  # type: ignore[import-not-found]
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer  # type: ignore[import-not-found]

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    trainers = {
        "dpo": (trl.DPOConfig, trl.DPOTrainer),
        "kto": (trl.KTOConfig, trl.KTOTrainer),
        "cpo": (CPOConfig, CPOTrainer),
        "orpo": (ORPOConfig, ORPOTrainer),
    }
    for _, case, place, out in each(folder, "theirs"):
        config, trainer = trainers[case.trainer]
        model = policy(place, case, torch.float32)
        more: dict[str, Any] = {}
        if case.trainer in ("dpo", "kto"):
            more["ref_model"] = AutoModelForCausalLM.from_pretrained(
                place / "model", dtype=torch.float32, attn_implementation="eager"
            )
        losses: list[float] = []
        logged: list[dict[str, float]] = []
        gradients: dict[str, Tensor] = {}

        class Recorded(trainer):  # type: ignore[misc, valid-type]
            def compute_loss(self, *given: Any, **keys: Any) -> Any:
                loss = super().compute_loss(*given, **keys)
                losses.append(loss.item())  # noqa: B023
                return loss

        class Kept(TrainerCallback):
            def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
                if state.global_step == 0:
                    gradients.update({n: p.grad.clone() for n, p in trained(model).items() if p.grad is not None})  # noqa: B023

            def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **given: Any) -> None:
                logged.append(logs)  # noqa: B023

        arguments = config(
            output_dir=str(out / "run"),
            per_device_train_batch_size=case.micro_batch,
            gradient_accumulation_steps=PAIRS // case.micro_batch,
            max_steps=STEPS,
            learning_rate=LR,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=0.0,
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            train_sampling_strategy="sequential",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            max_length=256,
            **case.settings,
        )
        made = Recorded(
            model=model,
            args=arguments,
            train_dataset=datasets.load_dataset("json", data_files=str(folder / f"{case.data}.jsonl"), split="train"),
            processing_class=PreTrainedTokenizerFast.from_pretrained(place / "model"),  # AutoTokenizer takes Qwen2's
            callbacks=[Kept()],
            **more,
        )
        made.train()
        parts = PAIRS // case.micro_batch
        figures = []
        for step in range(STEPS):
            loss = sum(losses[step * parts : (step + 1) * parts]) / parts
            figures.append(
                {"loss": loss, **{k: v for k, v in logged[step].items() if isinstance(v, float) and k != "loss"}}
            )
        keep(out, figures, gradients, trained(model))
    return 0


def exact(folder: Path) -> int:
    """The losses in float64, by their papers; then as TRL has them where it differs; then with errors in gradients."""
    for name, case, place, out in each(folder, "exact"):
        loss = LOSSES[name.partition(",")[0]]
        keep(out, *minimise(case, place, loss))
        keep(out / "disturbed", *minimise(case, place, loss, error=TOLERANCE))
        if name in THEIR_LOSSES:
            keep(out / "theirs", *minimise(case, place, THEIR_LOSSES[name]))
    return 0


Figures = dict[str, Tensor]
LogProbs = Callable[[list[int], list[int]], Tensor]
Loss = Callable[[LogProbs, LogProbs, list[Example]], Figures]
"""From (log-probabilities of an answer's tokens after a prompt, the same in the reference, data) to figures."""


def minimise(
    case: Case, place: Path, loss: Loss, *, error: float = 0.0
) -> tuple[list[dict[str, float]], dict[str, Tensor], dict[str, Tensor]]:
    """Train in float64. Every gradient gets a random error of `error` times its norm."""
    model, reference = (policy(place, one, torch.float64) for one in (case, Case({}, "", {}, full=True)))
    reference.requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    parameters = trained(model)
    optimizer = torch.optim.AdamW(parameters.values(), lr=LR, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    data = examples(case.data)
    referred = of_documents(reference, data)
    figures, gradients = [], {}
    for step in range(STEPS):
        optimizer.zero_grad()
        found = loss(of_documents(model, data), referred, data)
        found["loss"].backward()
        figures.append({n: float(v.detach()) for n, v in found.items()})
        if step == 0:
            gradients = {n: p.grad.clone() for n, p in parameters.items() if p.grad is not None}
        if error:
            for parameter in parameters.values():
                assert parameter.grad is not None
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * (parameter.grad != 0)
                parameter.grad += error * parameter.grad.norm() * noise / noise.norm().clamp(min=1e-30)
        optimizer.step()
    return figures, gradients, parameters


def of_documents(model: Any, data: list[Example]) -> LogProbs:
    """Return the log-probabilities of documents. Those of `data` are one batch, with padding after their ends."""
    kept: dict[tuple[int, ...], Tensor] = {}

    def add(documents: list[list[int]]) -> None:
        longest = max(map(len, documents))
        ids = torch.tensor([[*document, *[0] * (longest - len(document))] for document in documents])
        logits = model(input_ids=ids).logits[:, :-1]
        found = -F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
        kept.update({tuple(d): row[: len(d) - 1] for d, row in zip(documents, found, strict=True)})

    def log_probs(prompt: list[int], answer: list[int]) -> Tensor:
        document = [*prompt, *answer]
        if tuple(document) not in kept:
            add([document])
        return kept[tuple(document)][len(prompt) - 1 :]

    add([[*prompt, *answer] for prompt, answers, _ in data for answer in answers])
    return log_probs


def pairwise(of: Callable[[list[Tensor], list[Tensor]], Figures]) -> Loss:
    """Return the mean over pairs of figures of a pair: (p, r), log-probabilities of both answers' tokens."""

    def loss(p: LogProbs, r: LogProbs, data: list[Example]) -> Figures:
        every = [of([p(x, y) for y in answers], [r(x, y) for y in answers]) for x, answers, _ in data]
        return {name: torch.stack([one[name] for one in every]).mean() for name in every[0]}

    return loss


def rewarded(loss: Tensor, chosen: Tensor, rejected: Tensor) -> Figures:
    accuracy = (chosen > rejected).double()
    return {
        "loss": loss,
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
        "rewards/accuracies": accuracy,
    }


def sigmoid(p: list[Tensor], r: list[Tensor], smoothing: float = 0.0) -> Figures:
    chosen, rejected = (0.3 * (x.sum() - y.sum()) for x, y in zip(p, r, strict=True))
    z = chosen - rejected
    return rewarded(-(1 - smoothing) * F.logsigmoid(z) - smoothing * F.logsigmoid(-z), chosen, rejected)


def hinge(p: list[Tensor], r: list[Tensor]) -> Figures:
    chosen, rejected = (0.3 * (x.sum() - y.sum()) for x, y in zip(p, r, strict=True))
    return rewarded(torch.relu(1 - (chosen - rejected)), chosen, rejected)


def ipo(p: list[Tensor], r: list[Tensor]) -> Figures:
    means, sums = ([of(x) - of(y) for x, y in zip(p, r, strict=True)] for of in (Tensor.mean, Tensor.sum))
    return rewarded((means[0] - means[1] - 1 / (2 * 0.3)) ** 2, 0.3 * sums[0], 0.3 * sums[1])


def simpo(p: list[Tensor], r: list[Tensor]) -> Figures:
    chosen, rejected = (2.0 * x.mean() for x in p)
    return rewarded(-F.logsigmoid(chosen - rejected - 0.7), chosen, rejected)


def odds(p: list[Tensor]) -> Tensor:
    chosen, rejected = (x.mean() - torch.log(-torch.expm1(x.mean())) for x in p)
    return -0.4 * F.logsigmoid(chosen - rejected)


def orpo(p: list[Tensor], r: list[Tensor]) -> Figures:
    """Equation 6 of the paper: the cross-entropy of the chosen answer given its prompt, a mean over its tokens."""
    return rewarded(-p[0].mean() + odds(p), 0.4 * p[0].mean(), 0.4 * p[1].mean())


def their_orpo(p: LogProbs, r: LogProbs, data: list[Example]) -> Figures:
    """The cross-entropy of prompts and chosen answers, a mean over the tokens of all pairs."""
    whole = torch.cat([p(x[:1], [*x[1:], *answers[0]]) for x, answers, _ in data])
    terms = torch.stack([odds([p(x, y) for y in answers]) for x, answers, _ in data])
    return {"loss": -whole.mean() + terms.mean()}


def kto(p: LogProbs, r: LogProbs, data: list[Example]) -> Figures:
    """KL of each prompt with the answer of the one before, a mean over all answers."""
    h = torch.stack([p(x, y).sum() - r(x, y).sum() for x, (y,), _ in data])
    moved = [(x, data[i - 1].answers[0]) for i, (x, _, _) in enumerate(data)]
    with torch.no_grad():
        kl = torch.stack([p(x, y).sum() - r(x, y).sum() for x, y in moved]).mean().clamp(min=0)
    wanted = torch.tensor([example.desirable for example in data])
    loss = torch.where(wanted, 1.5 * (1 - (0.3 * (h - kl)).sigmoid()), 0.5 * (1 - (0.3 * (kl - h)).sigmoid()))
    return {"loss": loss.mean(), "kl": kl}


def their_kto(p: LogProbs, r: LogProbs, data: list[Example]) -> Figures:
    """KL of each micro-batch by itself, at least 0 in each."""
    parts = [kto(p, r, data[i : i + 2]) for i in range(0, PAIRS, 2)]
    return {name: torch.stack([part[name] for part in parts]).mean() for name in parts[0]}


LOSSES: dict[str, Loss] = {
    "sigmoid": pairwise(sigmoid),
    "smoothed": pairwise(lambda p, r: sigmoid(p, r, 0.2)),
    "hinge": pairwise(hinge),
    "ipo": pairwise(ipo),
    "simpo": pairwise(simpo),
    "orpo": pairwise(orpo),
    "kto": kto,
}
THEIR_LOSSES: dict[str, Loss] = {"orpo": their_orpo, "kto, micro-batches of 2": their_kto}


# ------------------------------------------------------------------------------------------------------- the results


@dataclass(frozen=True)
class Side:
    """The results of a side in a case."""

    figures: list[dict[str, float]]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]

    @classmethod
    def read(cls, out: Path) -> Side:
        from safetensors.torch import load_file

        gradients, weights = (load_file(out / f"{name}.safetensors") for name in ("gradients", "weights"))
        figures = json.loads((out / "figures.json").read_text())
        return cls(figures, *({n: t.double() for n, t in tensors.items()} for tensors in (gradients, weights)))


def errors(a: Side, b: Side, start: dict[str, Tensor], names: dict[str, str]) -> tuple[float, float, float, float]:
    """Return the errors of a: loss and rewards of step 1, gradients, losses of all steps, movement of the weights."""
    if a.gradients.keys() != b.gradients.keys() or a.weights.keys() != b.weights.keys():
        raise SystemExit(f"other tensors: {sorted(a.gradients.keys() ^ b.gradients.keys())[:4]}")
    at, of = a.figures[0], b.figures[0]
    first = abs(at["loss"] - of["loss"]) / of["loss"]
    scale = max((abs(of[theirs]) for theirs in names.values()), default=0.0)
    for own, their in names.items():
        first = max(first, abs(at[own] - of[their]) / (scale or 1.0))
    gradients = max(float((g - b.gradients[n]).norm() / b.gradients[n].norm()) for n, g in a.gradients.items())
    losses = max(abs(x["loss"] - y["loss"]) for x, y in zip(a.figures, b.figures, strict=True)) / of["loss"]
    moved = max(float((w - b.weights[n]).norm() / (b.weights[n] - start[n]).norm()) for n, w in a.weights.items())
    return first, gradients, losses, moved


def compare(folder: Path) -> int:
    """Print a table of the largest errors over the families, and return 1 if a bound does not hold."""
    worst: dict[str, list[list[float]]] = {}
    failed = False
    for name, case, place, out in each(folder, "compare"):
        parts = out.relative_to(folder / "compare")
        mine, their, true = (Side.read(folder / side / parts) for side in ("ours", "theirs", "exact"))
        start = {n: p.detach() for n, p in trained(policy(place, case, torch.float64)).items()}
        same = {n: n for n in true.figures[0] if n != "loss"}
        bound = errors(Side.read(folder / "exact" / parts / "disturbed"), true, start, {})
        their_true = Side.read(folder / "exact" / parts / "theirs") if name in THEIR_LOSSES else true
        rows = [
            errors(mine, their, start, case.names if case.agrees else {}),
            errors(mine, true, start, same),
            errors(their, their_true, start, {}),
            (TOLERANCE, TOLERANCE, TOLERANCE + bound[2], bound[3]),
        ]
        found = worst.setdefault(name, [[0.0] * 4 for _ in rows])
        found[:3] = [[max(x, y) for x, y in zip(a, b, strict=True)] for a, b in zip(found[:3], rows[:3], strict=True)]
        found[3] = [max(x, y) for x, y in zip(found[3], rows[3], strict=True)]
        sides = {"ours, TRL": rows[0], "ours, float64": rows[1]} if case.agrees else {"ours, float64": rows[1]}
        for label, row in sides.items():
            if not all(x <= y for x, y in zip(row, rows[3], strict=True)):  # no number, either
                print(f"{parts}: {label}: {row} exceed {rows[3]}")
                failed = True
    print("\nours from TRL / ours from float64 / TRL from float64 (of its own formula)\n")
    print("| | loss, rewards | gradients | losses of 20 steps | bound | weights after 20 | bound |")
    print("|---|---|---|---|---|---|---|")
    for name, errors_of in worst.items():
        first, gradients, losses, weights = (" / ".join(f"{row[n]:.1e}" for row in errors_of[:3]) for n in range(4))
        bounds = [f"{bound:.1e}" for bound in errors_of[3][2:]]
        print(f"| {name} | {first} | {gradients} | {losses} | {bounds[0]} | {weights} | {bounds[1]} |")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
