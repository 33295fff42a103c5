"""`shardway prefetch`: brings what a run needs from a hub into the cache, where there is a network, so that its job
needs none.

Invariants:
- Nothing is written outside the cache that HF_HUB_CACHE, HF_HOME or the site name; --dry-run and --check write nothing.
- What is there and whole is not fetched again; what was cut is gone on with. An error leaves what came.
- Facts go to stdout, progress and notes to stderr.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardway.cli.options import JsonOption, Words, print_json, read_request, report
from shardway.errors import Problem, SiteError, UserError, check_no_problems, legible
from shardway.places import expand_place

if TYPE_CHECKING:
    from shardway.prefetch.cache import HubCache
    from shardway.prefetch.check import FileFault
    from shardway.prefetch.hub import FetchState, HubClient, RemoteSnapshot
    from shardway.prefetch.space import Room
    from shardway.prefetch.wanted import WantedRepo, WantedThings

_NAME = "ORG/NAME[@REVISION]"


def prefetch(
    words: Words = None,
    model: Annotated[list[str] | None, typer.Option("--model", metavar=_NAME, help="A model.")] = None,
    tokenizer: Annotated[
        list[str] | None, typer.Option("--tokenizer", metavar=_NAME, help="Its tokenizer alone.")
    ] = None,
    dataset: Annotated[list[str] | None, typer.Option("--dataset", metavar=_NAME, help="A data set.")] = None,
    image: Annotated[
        list[str] | None, typer.Option("--image", metavar="URI", help="As `shardway image import`.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would come, and whether it fits.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Look at what is here; needs no network.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Read what is here, and compare its digests.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Bring models, tokenizers and data sets of a hub into the cache, before a job that has no network."""
    images = image or []
    if check and dry_run:
        raise UserError("--check looks at what is here, and --dry-run at what would come.\n  To do: leave one out.")
    if images and (as_json or check):
        raise UserError(
            "--image goes without --json and --check.\n  To do: `shardway image import` has both of its own."
        )
    wanted = _list_wanted(words, model or [], tokenizer or [], dataset or [], named=bool(images))
    cache = _find_cache(wanted)
    for note in wanted.notes:
        report(note)
    if check:
        _check_only(wanted, cache, reads=verify, as_json=as_json)
    elif wanted.repos:
        facts = _bring(wanted.repos, cache, dry_run=dry_run, verify=verify, quiet=as_json)
        if as_json:
            print_json(facts)
    for uri in images:
        from shardway.cli.image import import_image

        import_image(uri, dry_run=dry_run)


def _list_wanted(
    words: list[str] | None, models: list[str], tokenizers: list[str], datasets: list[str], *, named: bool
) -> WantedThings:
    """What the words of the command line need. Raises UserError where that is nothing."""
    from shardway.prefetch.cache import find_hub_name
    from shardway.prefetch.wanted import WantedThings, list_named, list_wanted
    from shardway.runfile.load import load_run
    from shardway.sites.load import load_site

    for text in dict.fromkeys([*models, *tokenizers, *datasets]):
        if os.path.lexists(expand_place(text)):
            shown = text if text.startswith(("/", ".", "~")) else f"./{text}"
            report(f"{legible(shown)} is here, needs no prefetch and is used as it is; {legible(text)} means the hub's")
    repos = list_named(models, tokenizers, datasets)
    of_run = WantedThings()
    if words:
        request = read_request(words, None)
        path = request.run_file
        if path is not None and not path.exists() and path.suffix != ".toml" and find_hub_name(str(path)):
            raise UserError(f"{path} is no run file.\n  To do: a repository is named by an option: --model {path}")
        loaded = load_run(request.run_file, request.overrides)
        of_run = list_wanted(loaded, load_site(loaded.values.site.name))
        if not of_run.repos:
            what = f"model.hf is the folder {of_run.folder}" if of_run.folder else "it has no model.hf"
            report(f"{request.run_file or 'the run'} needs nothing of a hub: {what}")
    elif not repos and not named:
        raise UserError("nothing was named.\n  To do: name a run file, or --model, --tokenizer, --dataset or --image.")
    return replace(of_run, repos=tuple(dict.fromkeys((*of_run.repos, *repos))))


def _find_cache(wanted: WantedThings) -> HubCache:
    from shardway.prefetch.cache import find_cache

    cache = find_cache(wanted.variables)
    here = find_cache()
    if here.folder != cache.folder:
        report(
            f"into the cache of the job, {cache.folder} ({cache.origin}); this shell has {here.folder} ({here.origin})"
        )
    return cache


# --- look only


def _check_only(wanted: WantedThings, cache: HubCache, *, reads: bool, as_json: bool) -> None:
    """Report what is missing or damaged. Raises UserError where anything is."""
    from shardway.prefetch.check import ModelNeeds, check_cached, check_model

    rows: list[tuple[str, str, str | None, Sequence[FileFault]]] = []
    for each in wanted.repos:
        model = check_cached(each.name, cache, each.needs, reads=reads)
        rows.append((each.where, str(each.name), str(model.folder) if model.folder else None, model.faults))
    if folder := wanted.folder and expand_place(wanted.folder):
        if not os.path.isdir(folder):
            raise UserError(f"model.hf: there is no folder {folder}.\n  To do: correct it, or name a model of the hub.")
        rows.append(("model.hf", str(folder), str(folder), check_model(folder, ModelNeeds())))
    if as_json:
        items = [
            {"name": name, "folder": place, "faults": [vars(f) for f in faults]} for _, name, place, faults in rows
        ]
        print_json({"cache": str(cache.folder), "items": items})
    problems = []
    for where, name, place, faults in rows:
        certain = _problems(where, name, faults)
        problems += certain
        for fault in faults:
            if fault.doubtful:
                report(legible(f"{name}: {fault}"))
        if not certain and not as_json:
            typer.echo(f"whole      {name}  {place}" if name != place else f"whole      {place}")
    check_no_problems(f"the cache {cache.folder}" if wanted.repos else "the model", problems)


def _problems(where: str, name: str, faults: Sequence[FileFault]) -> list[Problem]:
    return [
        Problem(where, what if what.startswith(name) else f'"{name}": {what}', remedy=fault.remedy)
        for fault in faults
        if not fault.doubtful
        for what in [str(fault)]
    ]


# --- fetch


@dataclass
class _Planned:
    """A repository with what the hub lists, and what has to come; `remote` None: the hub cannot be asked."""

    wanted: WantedRepo
    remote: RemoteSnapshot | None
    absent: dict[str, int]


def _bring(repos: Sequence[WantedRepo], cache: HubCache, *, dry_run: bool, verify: bool, quiet: bool) -> dict[str, Any]:
    """Fetch what is absent, or report it; returns the facts for --json."""
    from shardway.prefetch.hub import FetchState

    client, planned = _ask_hub(repos, cache, verify=verify)
    room = _look_at_room(cache)
    _report_room(planned, room, cache, dry_run=dry_run, quiet=quiet)
    facts: dict[str, Any] = {"cache": str(cache.folder), "room": room.as_json(), "dry_run": dry_run, "items": []}
    for each in planned:
        state = FetchState()
        folder: Path | None = None
        if not dry_run:
            folder = _fetch(each, client, cache, state)
        facts["items"].append(_describe(each, state, folder, cache))
        if folder is not None and not quiet:
            _print_item(each, state, folder)
    if dry_run and not quiet:
        typer.echo("nothing was fetched (--dry-run)")
    return facts


def _ask_hub(repos: Sequence[WantedRepo], cache: HubCache, *, verify: bool) -> tuple[HubClient | None, list[_Planned]]:
    """What the hub lists of each repository, and what of it is not here. Where the hub cannot be reached, or the
    environment forbids it, what is whole here stands. Raises UserError with the refusals of all."""
    from shardway.prefetch.cache import is_offline
    from shardway.prefetch.check import check_cached
    from shardway.prefetch.hub import HubClient, list_absent

    client = None if is_offline() else HubClient.open()
    planned, refusals, problems = list[_Planned](), list[UserError](), list[Problem]()
    for each in repos:
        try:
            if client is None:
                raise SiteError("HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set here")
            remote = client.list_files(each.name, each.patterns, each.left_out, each.where)
            _check_repository(each, remote, client)
            planned.append(_Planned(each, remote, list_absent(remote, cache.repo(each.name), reads=verify)))
        except UserError as error:
            refusals.append(error)
        except SiteError as error:
            here = check_cached(each.name, cache, each.needs, reads=verify)
            faults = _problems(each.where, str(each.name), here.faults)
            if faults and client is not None:
                raise
            remedy = "without these variables, where the hub can be reached"
            problems += [replace(each, remedy=f"{each.remedy}, {remedy}") for each in faults]
            if not faults:
                report(
                    f"{each.name} is whole in the cache; the hub was not asked for a newer one: {_first_line(error)}"
                )
                planned.append(_Planned(each, None, {}))
    if problems:
        title = (
            f"the cache {cache.folder}, and the hub is not asked: HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set here"
        )
        check_no_problems(title, problems)
    if len(refusals) == 1:
        raise refusals[0]
    if refusals:
        raise UserError("\n".join(str(error) for error in refusals))
    return client, planned


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _check_repository(wanted: WantedRepo, remote: RemoteSnapshot, client: HubClient) -> None:
    """Raise UserError where nothing of use would come."""
    from shardway.prefetch.hub import MOST_BYTES

    name, files = wanted.name, remote.files
    if remote.gated and not client.token:
        raise UserError(
            f'{wanted.where}: "{name}" is gated: its owners have to grant access, and no token is set here.\n'
            "  To do: accept its conditions on its page, then `hf auth login` or set HF_TOKEN."
        )
    if not files:
        raise UserError(
            f'{wanted.where}: "{name}" has no file of use here.\n  To do: correct the name or its revision.'
        )
    if large := [path for path, file in files.items() if file.size > MOST_BYTES]:
        raise UserError(
            f'{wanted.where}: "{name}" has {large[0]} of more than 50 GB, which a hub does not send over plain HTTP.\n'
            f"  To do: `hf download {name.repo}` (huggingface_hub with hf_xet) with the same HF_HOME; then "
            "`shardway prefetch --check` looks at it."
        )
    if wanted.needs.weights and name.kind == "model" and not any(path.endswith(".safetensors") for path in files):
        raise UserError(
            f'{wanted.where}: "{name}" has no safetensors files (older ones have .bin files alone).\n'
            "  To do: convert it once with transformers: from_pretrained(...), then save_pretrained(folder); or fetch "
            "its --tokenizer alone."
        )


def _look_at_room(cache: HubCache) -> Room:
    from shardway.prefetch.space import find_room

    try:
        return find_room(cache.folder)
    except OSError as error:
        raise SiteError(
            f"{cache.folder} ({cache.origin}) cannot be looked at: {error.strerror}.\n"
            "  To do: name another cache by HF_HOME or HF_HUB_CACHE."
        ) from error


_FOLDERS = 8
"""Inodes of the folders, the reference and the record of a repository."""


def _report_room(planned: Sequence[_Planned], room: Room, cache: HubCache, *, dry_run: bool, quiet: bool) -> None:
    """Print what would come where nothing is to be fetched. Raises UserError where it does not fit."""
    from shardway.prefetch.space import FILES_OF_A_FILE, render_amount
    from shardway.units import render_plural

    coming = [each for each in planned if each.absent]
    size = sum(sum(each.absent.values()) for each in coming)
    inodes = sum(FILES_OF_A_FILE * len(each.absent) + _FOLDERS for each in coming)
    if dry_run and not quiet:
        for each in planned:
            whole = each.remote.size if each.remote else 0
            count = len(each.remote.files) if each.remote else 0
            missing = f"{render_plural(len(each.absent), 'file')}, {render_amount(sum(each.absent.values()))}"
            holds = f"{render_plural(count, 'file')}, {render_amount(whole)}"
            typer.echo(f"{each.wanted.name.kind:<10} {each.wanted.name}  {holds}; to fetch: {missing}")
        inode = "no fixed number of inodes" if room.free_files is None else f"{room.free_files:,} inodes free"
        typer.echo(f"cache      {cache.folder} ({cache.origin})")
        typer.echo(f"needs      {render_amount(size)}, {inodes:,} inodes")
        typer.echo(f"has        {render_amount(room.free_bytes)} free, {inode} ({room.kind})")
        for quota in room.quotas:
            typer.echo(f"           {quota}")
        if not room.quotas:
            typer.echo(
                "           quotas: none that `quota` or `lfs quota` reports here; those of the site are its own"
            )
    if lacks := room.list_lacks(size, inodes) if coming else []:
        raise UserError(
            f"{'; '.join(lacks)}.\n  Nothing was fetched. To do: make room there, or name another cache by HF_HOME or "
            "HF_HUB_CACHE."
        )


def _fetch(planned: _Planned, client: HubClient | None, cache: HubCache, state: FetchState) -> Path:
    """Bring one repository, and look at the result. Raises UserError where the repository itself lacks something."""
    from shardway.prefetch.check import check_cached
    from shardway.prefetch.hub import Fetcher
    from shardway.prefetch.space import render_amount
    from shardway.units import render_plural

    wanted, remote = planned.wanted, planned.remote
    if remote is None or client is None:
        found = check_cached(wanted.name, cache, wanted.needs)
        return found.folder or cache.folder
    state.total_bytes = sum(remote.files[path].size for path in planned.absent)
    if planned.absent:
        count = render_plural(len(planned.absent), "file")
        report(f"fetching {count}, {render_amount(sum(planned.absent.values()))}, of {wanted.name} into {cache.folder}")
    try:
        with _progress(str(wanted.name)) as show:
            folder = Fetcher(client, cache, wanted.where).fetch(remote, list(planned.absent), state, show)
    except KeyboardInterrupt:
        report("what came is kept, and the same command goes on from there")
        raise
    finally:
        for note in state.notes:
            report(legible(note))
    found = check_cached(wanted.name, cache, wanted.needs)
    for fault in found.faults:
        if fault.doubtful:
            report(f"{wanted.name}: {fault}")
    remedy = "ask its owners to complete it, or choose another revision (@REVISION) or model"
    lacks = [replace(problem, remedy=remedy) for problem in _problems(wanted.where, str(wanted.name), found.faults)]
    check_no_problems(f"{wanted.name}, as the hub has it", lacks)
    return folder


@contextlib.contextmanager
def _progress(title: str) -> Iterator[Callable[[FetchState], None]]:
    """A bar with bytes, speed and the time left on stderr, if that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda state: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda state: bar.update(task, completed=state.done_bytes, total=state.total_bytes)


def _describe(planned: _Planned, state: FetchState, folder: Path | None, cache: HubCache) -> dict[str, Any]:
    wanted, remote = planned.wanted, planned.remote
    return {
        "name": str(wanted.name),
        "kind": wanted.name.kind,
        "commit": remote.commit if remote else cache.repo(wanted.name).find_commit(wanted.name.revision),
        "folder": str(folder) if folder else None,
        "files": len(remote.files) if remote else None,
        "bytes": remote.size if remote else None,
        "absent": planned.absent,
        "resumed_bytes": state.resumed_bytes,
        "received_bytes": state.done_bytes - state.resumed_bytes,
        "notes": state.notes,
    }


def _print_item(planned: _Planned, state: FetchState, folder: Path) -> None:
    from shardway.prefetch.space import render_amount
    from shardway.units import render_plural

    wanted, remote = planned.wanted, planned.remote
    came = (
        "all of it was here" if not planned.absent else f"{render_amount(state.done_bytes - state.resumed_bytes)} came"
    )
    if state.resumed_bytes:
        came += f", {render_amount(state.resumed_bytes)} was here from an earlier try"
    holds = f"{render_plural(len(remote.files), 'file')}, {render_amount(remote.size)}; " if remote else ""
    typer.echo(f"{wanted.name.kind:<10} {wanted.name}  {holds}{came}")
    typer.echo(f"folder     {folder}")
    key = {"--dataset": "data.path", "--tokenizer": "data.tokenizer"}.get(wanted.where, "model.hf")
    value = str(wanted.name) if key == "model.hf" else str(folder / "tokenizer.json" if "token" in key else folder)
    typer.echo(f"for a run  {key} = {json.dumps(value, ensure_ascii=False)}")
