"""All checks of one server, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from surogate.data.chat.row_tokenizer import RowTokenizer
from surogate.data.chats import Chat
from surogate.machine.progress import Progress, print_notice
from surogate_core.errors import ConfigError

from .adapter import check_adapter
from .connection import Connection, server_url
from .files import open_files
from .log_probs import Asked, Served, ask, asked_of, check_log_probs
from .protocol import Server
from .reference import open_reference, reference_folder
from .result import Result
from .rounding import ServedAs, served_as
from .run_data import CheckedRun, open_checked
from .servers import chosen_adapter, chosen_model, open_server
from .stops import check_stops
from .tokens import check_tokens


@dataclass(frozen=True)
class Request:
    """The arguments of `surogate check-serving`.

    url           address of the server, or a folder of files that are loaded in this process
    output        folder of the run
    rows          file of conversations; None: validation data of the run
    name          name that the server gives to the model; None: the only one that it serves
    adapter       name that the server gives to an adapter; None: none is asked
    format        form in which weights are served; None: as they were written
    conversations number that is compared
    timeout       seconds that are waited for an answer
    log_probs     whether log probabilities are compared, for which the model is loaded
    base          base of an adapter; None: the one that its files name
    config        YAML file of the run, whose plugins are loaded
    """

    url: str
    output: Path
    rows: Path | None = None
    name: str | None = None
    adapter: str | None = None
    format: str | None = None
    conversations: int = 16
    timeout: float = 120.0
    log_probs: bool = True
    base: str | None = None
    config: Path | None = None


@dataclass(frozen=True)
class Checked:
    """Results, and the program and model that were asked."""

    results: Sequence[Result]
    program: str
    model: str


def check(request: Request, notice: Callable[[str], None] = print_notice) -> Checked:
    """Compare a server with the output of a run. Raises ConfigError for what cannot be compared."""
    form = served_as(request.format)
    folder = Path(request.url) if "://" not in request.url and Path(request.url).is_dir() else None
    url = server_url(request.url) if folder is None else ""
    run = open_checked(request.output, request.config)
    if request.adapter is not None and not request.log_probs:
        raise ConfigError("--adapter and --no-log-probs: an adapter is seen by its log probabilities. Give one.")
    chats, tokenizer = run.chats(request.rows, request.conversations)
    server: Server
    if folder is not None:
        server = open_files(folder, run.registry, request.base)
    else:
        server = open_server(Connection(url, request.timeout, notice))
    adapter, base = request.adapter or server.adapter, None
    if adapter is not None:
        model, base = chosen_adapter(server, adapter, request.name)
    else:
        model = chosen_model(server, request.name)
    results = list(_checks(request, run, form, server, model, base, chats, tokenizer))
    if all(result.equal is None for result in results):
        raise ConfigError(f"{server.where}: nothing could be compared. {results[0].said}.")
    return Checked(results, server.program, model)


def _checks(
    request: Request,
    run: CheckedRun,
    form: ServedAs,
    server: Server,
    model: str,
    base: str | None,
    chats: Sequence[Chat],
    tokenizer: RowTokenizer,
) -> Iterator[Result]:
    with Progress("comparing tokens", "conversations", len(chats)) as progress:
        yield check_tokens(server, model, chats, tokenizer, progress)
    if request.log_probs:
        asked = asked_of(chats)
        served = _asked(server, model, asked)
        of_base = _asked(server, base, asked) if base is not None else None
        yield _log_probs(request, run, form, server, served, of_base)
        if of_base is not None and base is not None:
            yield check_adapter(server.words, model, base, served, of_base)
    yield check_stops(server, model, chats, tokenizer)


def _asked(server: Server, model: str, asked: Asked) -> Served:
    with Progress(f"asking {server.program} for {model}", "conversations", len(asked)) as progress:
        return ask(server, model, asked, progress)


def _log_probs(
    request: Request,
    run: CheckedRun,
    form: ServedAs,
    server: Server,
    served: Served,
    of_base: Served | None,
) -> Result:
    """Compare log probabilities with those of the output in this process."""
    with ExitStack() as stack:
        folder = stack.enter_context(reference_folder(run.found, request.base, request.config))
        reference = open_reference(folder, run.registry, form.dtype)
        progress = stack.enter_context(Progress("computing in process", "conversations", len(served.asked)))
        return check_log_probs(server, served, reference, form.errors, of_base, progress)
