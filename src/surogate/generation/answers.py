"""Answers of a model in transformers: loaded once, one prompt or several at a time. Imports torch and transformers on
use."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from surogate_core.errors import ConfigError

from ..data.chat.row_tokenizer import RowTokenizer
from ..outputs.check_process import quiet, refuse_incomplete
from .model_files import ModelFiles

if TYPE_CHECKING:
    from pathlib import Path

Finish = Literal["stop", "length", "interrupted"]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Settings by which tokens are chosen. temperature: 0: the most likely one; else by `seed`, set for each answer."""

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


def checked(sampling: Sampling) -> Sampling:
    """Return it. Raises ConfigError for numbers with which nothing can be drawn."""
    if not 0 <= sampling.temperature < math.inf:
        raise ConfigError(f"temperature: {sampling.temperature} is no temperature. Use 0, or a number such as 0.7.")
    if not 0 < sampling.top_p <= 1:
        raise ConfigError(f"top_p: {sampling.top_p} is no share of the tokens. Use a number above 0, at most 1.")
    if sampling.top_p < 1 and not sampling.temperature:
        raise ConfigError(f"top_p: {sampling.top_p} has no effect at temperature 0. Set a temperature, such as 0.7.")
    return sampling


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A prompt of a batch: its tokens, where it is, and special tokens that are part of the text of its answer."""

    ids: Sequence[int]
    where: str = "the prompt"
    visible: Collection[int] = ()


@dataclass(frozen=True)
class Answer:
    """A text that a model has written after `prompt_tokens` tokens.

    text     without special tokens
    tokens   with the one that ended it
    finish   stop: the model has ended it; length: it has all tokens that it may have; interrupted: `stopped` said so
    seconds  each of several prompts that were answered at once has its share
    """

    text: str
    tokens: Sequence[int]
    prompt_tokens: int
    finish: Finish
    seconds: float


@dataclass
class LoadedModel:
    """A model on the device that it computes on."""

    files: ModelFiles
    model: Any = field(repr=False)

    def answer(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        stops: Sequence[int],
        where: str = "the prompt",
        on_text: Callable[[str], None] = lambda text: None,
        stopped: Callable[[], bool] = lambda: False,
        seeded: bool = True,
        visible: Collection[int] = (),
    ) -> Answer:
        """Return what the model writes after `ids`, up to one of `stops` or `ModelFiles.room` tokens.

        on_text: called with each piece of the text once it is whole. stopped: looked at after each token. seeded: begin
        with the seed; False: go on with the random numbers of the answer before. visible: special tokens that are part
        of the text. Raises ConfigError for a prompt that is longer than the model reads.
        """
        import torch
        from transformers import StoppingCriteria, StoppingCriteriaList

        tokenizer, room = self.files.tokenizer, self.files.room(len(ids), sampling.max_new_tokens, where)
        text, began = StreamedText(tokenizer, on_text, visible), time.perf_counter()

        class Stop(StoppingCriteria):  # type: ignore[misc, unused-ignore]
            def __call__(self, input_ids: Any, scores: Any, **more: Any) -> Any:
                return torch.full((input_ids.shape[0],), stopped(), dtype=torch.bool, device=input_ids.device)

        more = {"streamer": text, "stopping_criteria": StoppingCriteriaList([Stop()])}
        self._generate([ids], room, sampling, stops, where, seeded=seeded, **more)
        return _answered(text, len(ids), room, stops, time.perf_counter() - began)

    def answer_batch(self, batch: Sequence[Asked], sampling: Sampling, stops: Sequence[int]) -> list[Answer]:
        """Return what the model writes after several prompts at once, each as `answer` says, in about the time of one.

        At temperature 0 it is what it writes after each alone, but where two tokens are as likely up to rounding; what
        is drawn is drawn for the batch. Raises ConfigError as `answer`.
        """
        began, tokenizer, wanted = time.perf_counter(), self.files.tokenizer, sampling.max_new_tokens
        rooms = [self.files.room(len(asked.ids), wanted, asked.where) for asked in batch]
        written = self._generate([asked.ids for asked in batch], max(rooms), sampling, stops, batch[0].where)
        found, share = [], (time.perf_counter() - began) / len(batch)
        for asked, room, tokens in zip(batch, rooms, written, strict=True):
            text = StreamedText(tokenizer, visible=asked.visible)
            text.extend(_up_to_stop(tokens[:room], stops))
            found.append(_answered(text, len(asked.ids), room, stops, share))
        return found

    def _generate(
        self,
        prompts: Sequence[Sequence[int]],
        room: int,
        sampling: Sampling,
        stops: Sequence[int],
        where: str,
        seeded: bool = True,
        **more: Any,
    ) -> list[list[int]]:
        """Return the tokens after each prompt; behind the one that ended it, a shorter answer is padded."""
        import torch
        from transformers import GenerationConfig

        tokenizer, longest = self.files.tokenizer, max(map(len, prompts))
        chosen: dict[str, Any] = {"do_sample": False}
        if sampling.temperature:
            chosen = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
        settings = GenerationConfig(
            max_new_tokens=room,
            eos_token_id=[*stops] or None,
            pad_token_id=tokenizer.padding_id,
            bos_token_id=tokenizer.bos_id,
            **chosen,
        )
        self.model.generation_config = settings  # its own values would fill what these leave out
        if seeded:
            torch.manual_seed(sampling.seed)
        missing = [longest - len(ids) for ids in prompts]  # in front: answers begin at one place
        given = [[tokenizer.padding_id] * less + [*ids] for less, ids in zip(missing, prompts, strict=True)]
        mask = [[0] * less + [1] * len(ids) for less, ids in zip(missing, prompts, strict=True)]
        device = self.model.device
        with _explained(f"{where}: the answer failed in transformers"), torch.inference_mode(), quiet():
            found = self.model.generate(
                torch.tensor(given, device=device),
                attention_mask=torch.tensor(mask, device=device),
                generation_config=settings,
                **more,
            )
        return [row[longest:] for row in found.tolist()]


def _answered(text: StreamedText, prompt_tokens: int, room: int, stops: Sequence[int], seconds: float) -> Answer:
    written = text.tokens
    ended = bool(written) and written[-1] in stops
    finish: Finish = "stop" if ended else "length" if len(written) >= room else "interrupted"
    return Answer(text.text, written, prompt_tokens, finish, seconds)


def _up_to_stop(tokens: Sequence[int], stops: Sequence[int]) -> Sequence[int]:
    end = next((place for place, token in enumerate(tokens) if token in stops), len(tokens))
    return tokens[: end + 1]


class _NotShown(Exception):
    """Printing a piece of text failed, as into a pipe without a reader, while transformers called it."""

    def __init__(self, reason: OSError) -> None:
        super().__init__(str(reason))
        self.reason = reason


class StreamedText:
    """A streamer of transformers: turns tokens into text as they come.

    Special tokens that are not `visible` are in `tokens` alone. A piece of text is passed on when the tokens so far end
    with a whole character.
    """

    def __init__(
        self, tokenizer: RowTokenizer, on_text: Callable[[str], None] = lambda text: None, visible: Collection[int] = ()
    ) -> None:
        self.tokens: list[int] = []
        self.text = ""
        self._tokenizer, self._on_text = tokenizer, on_text
        self._hidden = {*tokenizer.special_ids} - {*visible}
        self._shown: list[int] = []
        self._from = self._whole = 0  # tokens before the decoded ones, and before those not yet passed on
        self._prompt = True

    def put(self, value: Any) -> None:
        """Take the prompt, once, and then each new token."""
        if self._prompt:
            self._prompt = False
            return
        self._take(value.reshape(-1).tolist())

    def extend(self, tokens: Iterable[int]) -> None:
        """Take all of a text, without its prompt."""
        self._take(tokens)
        self.end()

    def _take(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self.tokens.append(token)
            if token not in self._hidden:
                self._shown.append(token)
                self._pass_on(last=False)

    def end(self) -> None:
        self._pass_on(last=True)

    def _pass_on(self, *, last: bool) -> None:
        """Decode from a few tokens back: how a token is written may depend on the one in front of it."""
        before = self._tokenizer.decode(self._shown[self._from : self._whole])
        after = self._tokenizer.decode(self._shown[self._from :])
        if not last and (after.endswith("�") or len(after) <= len(before)):
            return
        piece = after[len(before) :]
        self._from, self._whole = self._whole, len(self._shown)
        if piece:
            self.text += piece
            try:
                self._on_text(piece)
            except OSError as error:
                raise _NotShown(error) from error


def load(files: ModelFiles, device: str | None = None, dtype: str = "auto") -> LoadedModel:
    """Load a model, and the adapter on it. device: None: the GPU, if torch sees one, else the CPU.

    Raises ConfigError if transformers or PEFT does not load it. No code of the folder runs.
    """
    import torch

    where = device or ("cuda:0" if torch.cuda.is_available() else "cpu")
    model = load_base(files, where, dtype)
    if files.adapter_dir is not None:
        model = with_adapter(model, files.adapter_dir)
    return LoadedModel(files, model.eval())


def load_base(files: ModelFiles, device: str, dtype: str = "auto") -> Any:
    with _explained(f"{files.model_dir}: does not load in transformers"), quiet():
        import transformers

        model, report = getattr(transformers, files.loaded_by).from_pretrained(
            files.model_dir,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            dtype=dtype,
            device_map=None if device == "cpu" else {"": device},
            output_loading_info=True,
        )
        refuse_incomplete(report | {"unexpected_keys": ()})  # a class may lack heads that files have
        return model


def with_adapter(model: Any, folder: Path) -> Any:
    """Return a model with the adapter in a folder. Raises ConfigError if PEFT is not installed or does not load it."""
    try:
        with quiet():
            from peft import PeftModel
    except ImportError as error:
        raise ConfigError(f"{folder}: is an adapter, which PEFT loads: {error}. pip install peft.") from error
    with _explained(f"{folder}: does not load in PEFT"), quiet(), warnings.catch_warnings():
        warnings.filterwarnings("error", message="Found missing adapter keys")
        return PeftModel.from_pretrained(model, str(folder))


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turn what a library raises into one line."""
    try:
        yield
    except ConfigError:
        raise
    except _NotShown as error:
        raise error.reason from None
    except Exception as error:  # libraries raise exceptions of many types
        reason = " ".join(str(error).split()) or type(error).__name__
        remedy = "Name another folder."
        if type(error).__name__ == "OutOfMemoryError":
            remedy = "Use a GPU with more memory, or the CPU: CUDA_VISIBLE_DEVICES=."
        elif isinstance(error, ImportError):
            remedy = "Install what it names."
        raise ConfigError(f"{what}: {reason[:600].rstrip('.')}. {remedy}") from error
