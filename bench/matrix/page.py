"""Markdown that the benches write: tables, and parts of a page that are written anew. Pure."""

from collections.abc import Iterable, Sequence

from bench.serving.errors import BadScenario


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table, all columns but the first to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def put(page: str, name: str, text: str) -> str:
    """Return the page with `text` between the comments `<!-- NAME -->` and `<!-- /NAME -->`.

    Raises BadScenario if the page hasn't each of them once.
    """
    start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    if page.count(start) != 1 or page.count(end) != 1:
        raise BadScenario(f"wanted {start.strip()} and {end} in the page, each once on a line of its own")
    before, rest = page.split(start)
    return f"{before}{start}{text}\n{end}{rest.split(end)[1]}"
