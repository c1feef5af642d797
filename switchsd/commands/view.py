"""`switchsd view`: a trace as one page to look at, or two side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from switchsd.options import UsageError, check_output, write_page
from switchsd.show import AsJson, as_json, bar, counted, out


def view(
    traces: Annotated[
        list[Path],
        typer.Argument(help="A trace that `generate`, `chat` or `decoder.trace.save` wrote; with --compare, two."),
    ],
    compare: Annotated[bool, typer.Option("--compare", help="Show two traces side by side.")] = False,
    file: Annotated[Path, typer.Option("--out", help="The page.")] = Path("trace.html"),
    text: Annotated[int | None, typer.Option(help="Which text is shown first, from 1.")] = None,
    json: AsJson = False,
) -> None:
    """Show a trace as one HTML page that needs nothing else: the text, who drafted each token, and every step."""
    if compare and len(traces) != 2:
        raise UsageError(f"--compare takes two traces, and {len(traces)} {'is' if len(traces) == 1 else 'are'} named")
    if not compare and len(traces) != 1:
        raise UsageError(f"{len(traces)} traces are named: add --compare to show two side by side")
    for trace in traces:
        if not trace.is_file():
            wrong = "is no file" if trace.exists() else "is not there"
            raise UsageError(f"{trace} {wrong}: name a trace that `switchsd generate --trace` wrote")
        if file.resolve() == trace.resolve():
            raise UsageError(f"--out is {file}, which is read: choose another name for the page")
    if compare and traces[0].resolve() == traces[1].resolve():
        raise UsageError(f"{traces[0]} is named twice: --compare takes two traces")
    if file.suffix == ".parquet":
        raise UsageError(f"--out is {file}, a name of a trace: the page is HTML, name it {file.stem}.html")
    check_output(file)
    from decoding.trace import Trace
    from decoding.viewer import compared, page
    from decoding.viewer.data import summaries

    with bar("reading"):
        read = [Trace.load(trace) for trace in traces]
        told = [summaries(trace) for trace in read]
    count = max(len(one) for one in told)
    if text is not None and not 1 <= text <= count:
        held = f"holds {counted(count, 'text')}: say 1 to {count}" if count else "holds no texts: leave --text out"
        raise UsageError(f"--text is {text}; the trace {held}")
    first = None if text is None else text - 1
    with bar("writing"):
        names = [trace.name for trace in traces]
        if compare:
            names = names if names[0] != names[1] else [str(trace) for trace in traces]
            made = compared(read[0], read[1], (names[0], names[1]), first)
        else:
            made = page(read[0], names[0], first)
    write_page(file, made)
    if json:
        shown = [{"trace": str(trace), "texts": one} for trace, one in zip(traces, told, strict=True)]
        as_json({"file": str(file), "traces": shown})
        return
    out.print(f"{file}: open it in a browser", markup=False, soft_wrap=True)
