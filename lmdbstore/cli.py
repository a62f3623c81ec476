"""The commands: each calls one function of the library, and prints what it returns."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from lmdbstore.errors import LmdbstoreError, OptionError

# Exit codes
OK, NOTHING_DONE, USAGE, SOME_REJECTED, INTERRUPTED, TERMINATED = 0, 1, 2, 3, 130, 143

app = typer.Typer(
    name="lmdbstore",
    help="Feed image training from one memory-mapped LMDB file: ingest once per machine, then train at full speed.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

StorePath = Annotated[Path, typer.Argument(metavar="STORE", help="The store, NAME.lmdb.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")]


# typer brings click inside it since 0.26 and beside it before: either way, this is what its usage errors are
_UsageError: Any = typer.BadParameter.__mro__[2]


class _Stopped(BaseException):
    """SIGINT or SIGTERM, unwound like any exception so that everything is closed on the way."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def main() -> None:
    """Run the command line; every error is one line, every kind has its exit code."""
    signal.signal(signal.SIGINT, _stop)
    signal.signal(signal.SIGTERM, _stop)
    sys.exit(_run())


def _run() -> int:
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()
        return code or OK
    except _UsageError as error:
        error.show()
        return USAGE
    except BrokenPipeError:  # `lmdbstore info ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NOTHING_DONE
    except LmdbstoreError as error:
        _say(f"lmdbstore: {error}")
        return USAGE if isinstance(error, OptionError) else NOTHING_DONE
    except OSError as error:
        _say(f"lmdbstore: {error.filename}: {error.strerror}" if error.filename else f"lmdbstore: {error}")
        return NOTHING_DONE
    except _Stopped as stop:
        _say(f"lmdbstore: {stop}")
        return stop.code


def _stop(number: int, _: Any) -> None:
    if number == signal.SIGINT:
        raise _Stopped("interrupted", INTERRUPTED)
    raise _Stopped("terminated", TERMINATED)


def _say(line: str) -> None:
    print(line, file=sys.stderr)


@contextmanager
def _bar(quiet: bool, *, unit: str = "images", scale: bool = False) -> Iterator[Callable[..., None]]:
    """Yield a function (done, total, note) that moves a progress bar; none is drawn off a terminal."""
    from tqdm import tqdm

    with tqdm(total=0, unit=f" {unit}", unit_scale=scale, disable=True if quiet else None, leave=False) as bar:

        def move(done: int, total: int, note: str = "") -> None:
            bar.total = total
            bar.set_postfix_str(note, refresh=False)
            bar.update(done - bar.n)

        yield move


@app.command()
def ingest(
    train_csv: Annotated[Path, typer.Argument(metavar="TRAIN_CSV", help="UTF-8 csv with a header.")],
    images: Annotated[Path, typer.Option(metavar="DIR", help="The folder of images.")],
    out: Annotated[Path, typer.Option(metavar="STORE", help="The store to make, NAME.lmdb.")],
    id_column: Annotated[str, typer.Option(help="The csv's column of ids.")] = "id",
    path: Annotated[
        str | None,
        typer.Option(metavar="TEMPLATE", help="Where an id's file is: '{id[0]}/{id}.jpg'. Known layouts are found."),
    ] = None,
    check: Annotated[str, typer.Option(metavar="decode|header|none", help="How closely to look at each.")] = "decode",
    order: Annotated[str, typer.Option(metavar="id|csv|shuffle", help="The order in the file.")] = "id",
    strict: Annotated[bool, typer.Option("--strict", help="Publish nothing if a row can't be stored.")] = False,
    keep_truncated: Annotated[bool, typer.Option("--keep-truncated", help="Take images that end early.")] = False,
    follow_links: Annotated[bool, typer.Option("--follow-links", help="Take files linked from outside DIR.")] = False,
    tile: Annotated[bool, typer.Option("--tile", help="Make JPEGs that can be cut, losslessly.")] = False,
    short_side: Annotated[int | None, typer.Option(metavar="PIXELS", help="Shrink to this shorter side.")] = None,
    max_side: Annotated[int | None, typer.Option(metavar="PIXELS", help="Shrink to this longer side.")] = None,
    quality: Annotated[int | None, typer.Option(metavar="1-100", help="Of the JPEGs that shrinking makes.")] = None,
    pixels: Annotated[bool, typer.Option("--pixels", help="Store decoded pixels, for small images.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace STORE when the new one is complete.")] = False,
    workers: Annotated[int | None, typer.Option(help="Threads that read and check; default: all cores.")] = None,
    quiet: Quiet = False,
) -> int:
    """Write the images of a csv's rows into one store.

    Interrupted, the same command goes on where it stopped. Exit codes: 0 every row is
    stored; 3 published, some rows were rejected; 1 nothing was published; 2 usage.
    """
    from lmdbstore.ingestion import IngestOptions, Progress
    from lmdbstore.ingestion import ingest as run

    options = IngestOptions(
        id_column=id_column,
        path=path,
        check=check,
        order=order,
        strict=strict,
        keep_truncated=keep_truncated,
        follow_links=follow_links,
        workers=workers,
        tile=tile,
        short_side=short_side,
        max_side=max_side,
        quality=quality,
        pixels=pixels,
    )
    last = Progress(0, 0, 0)
    with _bar(quiet) as move, _going_on(lambda: last, out):

        def progress(now: Progress) -> None:
            nonlocal last
            last = now
            move(now.settled, now.total, f"{now.bytes / 1e6:,.0f} MB")

        report = run(train_csv, images=images, out=out, overwrite=overwrite, options=options, progress=progress)
    if not quiet:
        _print_report(report)
    return SOME_REJECTED if report.rejects else OK


@contextmanager
def _going_on(last: Callable[[], Any], out: Path) -> Iterator[None]:
    try:
        yield
    except _Stopped as stop:
        kept = f"{last().settled:,} rows are settled in {out}.partial; the same command goes on from there"
        raise _Stopped(f"{stop}; {kept}", stop.code) from None


def _print_report(report: Any) -> None:
    if report.resumed_from:
        print(f"went on after {report.resumed_from:,} rows of an interrupted ingest")
    print(f"layout {report.template}")
    for note in report.notes:
        print(f"note: {note}")
    size, rate = report.bytes / 1e6, report.images / max(report.seconds, 1e-9)
    print(f"{report.path}: {report.images:,} images, {size:,.1f} MB, in {report.seconds:.1f} s ({rate:,.0f} images/s)")
    if report.rejects:
        listed = f"listed in {report.path}.rejects.csv"
        print(f"{len(report.rejects):,} of {report.rows:,} rows were rejected, {listed}; the first:")
        for reject in report.rejects[:3]:
            print(f"  line {reject.line}: id {reject.id!r}: {reject.reason}")


@app.command()
def info(
    store: StorePath,
    as_json: Json = False,
    rejects: Annotated[bool, typer.Option("--rejects", help="List the rows that aren't in the store.")] = False,
    shuffle_quality: Annotated[
        bool, typer.Option("--shuffle-quality", help="Say how well the sampler's blocks mix the labels.")
    ] = False,
    label: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Of --shuffle-quality; default: the first.")
    ] = None,
) -> None:
    """Say what is in a store, and how much of it is in memory."""
    from lmdbstore import pagecache
    from lmdbstore.store import ImageStore

    resident = pagecache.resident(store) if store.is_file() else None  # before anything of it is read
    with ImageStore(store) as opened:
        if shuffle_quality:
            from lmdbstore.mixing import mixing

            found = mixing(opened, label=label)
            print(json.dumps(found.to_dict(), indent=2) if as_json else "\n".join(found.lines()))
            return
        if rejects:
            listed = [reject._asdict() for reject in opened.rejects()]
            print(
                json.dumps(listed, indent=2)
                if as_json
                else "\n".join("{line}: {id!r}: {reason}".format(**r) for r in listed)
            )
            return
        facts = {**opened.info(), "resident_bytes": resident}
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    for name, value in facts.items():
        text = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
        print(
            f"{name.replace('_', ' '):15} {text:,}" if isinstance(text, int) else f"{name.replace('_', ' '):15} {text}"
        )


@app.command()
def verify(
    store: StorePath,
    decode: Annotated[bool, typer.Option("--decode", help="Decode every image as well.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Check a whole store and report every problem; exit code 0 or 1."""
    from lmdbstore.verification import verify as run

    with _bar(quiet or as_json) as move:
        report = run(store, decode=decode, progress=move)
    if as_json:
        print(json.dumps({"images": report.images, "bytes": report.bytes, "problems": report.problems}, indent=2))
    else:
        for problem in report.problems:
            print(problem)
        if not quiet:
            verdict = f"{len(report.problems)} problems" if report.problems else "whole"
            print(
                f"{store}: {verdict}; {report.images:,} images, {report.bytes / 1e6:,.1f} MB in {report.seconds:.1f} s"
            )
    return NOTHING_DONE if report.problems else OK


@app.command()
def get(
    store: StorePath,
    id: Annotated[str, typer.Argument(metavar="ID")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Default: standard output.")
    ] = None,
) -> None:
    """Write the bytes of one image."""
    from lmdbstore.store import ImageStore

    with ImageStore(store) as opened:
        data = opened.read(id)
    if output is not None:
        output.write_bytes(data)
    elif sys.stdout.isatty():
        raise LmdbstoreError(f"{id!r} is {len(data):,} bytes of image; name a file with -o, or redirect the output")
    else:
        sys.stdout.buffer.write(data)


@app.command()
def export(
    store: StorePath,
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to make.")],
    ids: Annotated[Path | None, typer.Option(metavar="FILE", help="Only these ids, one per line.")] = None,
    quiet: Quiet = False,
) -> None:
    """Write files and csv again, byte for byte as they are stored."""
    from lmdbstore.export import changes
    from lmdbstore.export import export as run
    from lmdbstore.store import ImageStore

    with ImageStore(store) as opened, _bar(quiet) as move:
        count = run(opened, out=out, ids=None if ids is None else _lines(ids), progress=move)
    if not quiet:
        print(f"{out}: {count:,} images and {opened.manifest.source['csv']}")
        for change in changes(opened.manifest):
            print(f"note: {change}")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LmdbstoreError(f"{path}: {error}") from None


@app.command()
def warm(
    store: StorePath,
    ids: Annotated[Path | None, typer.Option(metavar="FILE", help="Only these ids, one per line.")] = None,
    quiet: Quiet = False,
) -> None:
    """Read a store, or some images of it, into memory, in the order of the file."""
    from lmdbstore import pagecache
    from lmdbstore.store import ImageStore

    ranges = None
    if ids is not None:
        with ImageStore(store) as opened:
            at = opened.indices(_lines(ids))
            ranges = opened.column("offset")[at], opened.column("length")[at]
    else:
        ImageStore(store).close()  # says what is wrong, if it is no store
    with _bar(quiet, unit="B", scale=True) as move:
        done = pagecache.warm(store, ranges, progress=move)
    if not quiet:
        print(f"{store}: {done.fits / 1e6:,.1f} MB in memory, of which {done.read / 1e6:,.1f} MB were read now")
        if done.left_out:
            print(f"{done.left_out / 1e6:,.1f} MB don't fit into the memory that is available, and were left out")


@app.command()
def evict(store: StorePath, quiet: Quiet = False) -> None:
    """Drop a store from memory, to measure a cold epoch or to make room."""
    from lmdbstore import pagecache
    from lmdbstore.store import ImageStore

    ImageStore(store).close()  # says what is wrong, if it is no store
    left = pagecache.evict(store)
    if left:
        raise LmdbstoreError(
            f"{store}: {left:,} bytes stay in memory, some process has them open; end it and try again"
        )
    if not quiet:
        print(
            f"{store}: " + ("evicted; this system doesn't say what is left" if left is None else "nothing is in memory")
        )


@app.command()
def doctor(
    store: Annotated[Path | None, typer.Argument(metavar="[STORE]", help="The store, NAME.lmdb.")] = None,
    csv: Annotated[Path | None, typer.Option(metavar="TRAIN_CSV", help="The csv of a folder of images.")] = None,
    images: Annotated[Path | None, typer.Option(metavar="DIR", help="The folder of images.")] = None,
    id_column: Annotated[str, typer.Option(help="The csv's column of ids.")] = "id",
    pipeline: Annotated[str, typer.Option(metavar="seed|rrc", help="The augmentation to measure with.")] = "seed",
    as_json: Json = False,
) -> None:
    """Say why the first epoch is slow: measure disk and cores for half a minute, and explain."""
    from lmdbstore.doctor import diagnose

    diagnosis = diagnose(store, csv=csv, images=images, id_column=id_column, pipeline=pipeline)
    print(json.dumps(diagnosis.to_dict(), indent=2) if as_json else "\n".join(diagnosis.lines()))


@app.command()
def bench(
    store: StorePath,
    csv: Annotated[Path | None, typer.Option(metavar="TRAIN_CSV", help="Measure the folder beside the store.")] = None,
    images: Annotated[Path | None, typer.Option(metavar="DIR", help="The folder of images.")] = None,
    epochs: Annotated[int, typer.Option(help="Epochs of each side, in turn.")] = 3,
    workers: Annotated[int, typer.Option(help="Workers of DataLoader, threads of BatchLoader.")] = 2,
    loader: Annotated[str, typer.Option(metavar="dataloader|batch", help="What iterates the store.")] = "dataloader",
    batch_size: Annotated[int, typer.Option(help="Images a batch.")] = 64,
    pipeline: Annotated[str, typer.Option(metavar="seed|rrc", help="The augmentation.")] = "seed",
    cold: Annotated[bool, typer.Option("--cold", help="Begin each side with nothing of it in memory.")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="PNG", help="Draw images/s over time.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Time epochs of a store, and of the folder that it came from."""
    from lmdbstore.bench import Progress, run

    with _bar(quiet or as_json) as move:

        def progress(now: Progress) -> None:
            move(now.images, now.total, now.epoch)

        result = run(
            store,
            csv=csv,
            images=images,
            epochs=epochs,
            workers=workers,
            batch_size=batch_size,
            pipeline=pipeline,
            cold=cold,
            loader=loader,
            progress=progress,
        )
    if plot is not None:
        from lmdbstore.plots import plot_bench

        plot_bench(result, plot)
    print(json.dumps(result.to_dict(), indent=2) if as_json else result.table())


Label = Annotated[str | None, typer.Option(metavar="L", help="Only images with this label.")]
Column = Annotated[
    str | None, typer.Option(metavar="NAME", help="The column of labels; default: the first of integers.")
]


@app.command()
def show(
    store: StorePath,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="PICTURE", help=".png, .jpg, .pdf, .svg, ...")],
    id: Annotated[list[str] | None, typer.Argument(metavar="[ID]", help="These images.")] = None,
    ids: Annotated[Path | None, typer.Option(metavar="FILE", help="These images, one id per line.")] = None,
    random: Annotated[int, typer.Option(metavar="N", help="So many of them, at random.")] = 16,
    seed: Annotated[int, typer.Option(help="Of the choice.")] = 0,
    label: Label = None,
    column: Column = None,
    rejects: Annotated[bool, typer.Option("--rejects", help="The first N rejected rows, with the reasons.")] = False,
    images: Annotated[Path | None, typer.Option(metavar="DIR", help="Where the files of rejected rows are.")] = None,
    quiet: Quiet = False,
) -> None:
    """Draw a contact sheet: images with id, label and size, or rejected rows with their reasons."""
    from lmdbstore.selection import labelled
    from lmdbstore.store import ImageStore

    listed = [*(id or ()), *(() if ids is None else _lines(ids))]
    if bool(listed) + (label is not None) + rejects > 1:
        raise OptionError("ids, --label and --rejects: one of them, or none for a random choice")
    with ImageStore(store) as opened:
        if rejects:
            picture = opened.show_rejects(images, n=random)
        elif listed:
            picture = opened.show(listed, label=column)
        else:
            chosen = opened if label is None else labelled(opened, label, column=column)
            picture = chosen.show(n=random, label=column, seed=seed)
    picture.save(output)
    if not quiet:
        print(output)


@app.command()
def ls(
    store: StorePath,
    label: Label = None,
    column: Column = None,
    csv: Annotated[bool, typer.Option("--csv", help="Print csv.")] = False,
) -> None:
    """List the images: id, columns of the csv, size in pixels (before EXIF orientation), format, bytes."""
    from lmdbstore.listing import lines
    from lmdbstore.selection import labelled
    from lmdbstore.store import ImageStore

    with ImageStore(store) as opened:
        for line in lines(opened[:] if label is None else labelled(opened, label, column=column), as_csv=csv):
            print(line)
