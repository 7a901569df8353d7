"""Commands for the server: serve, dashboard, token."""

from __future__ import annotations

import contextlib
from pathlib import Path

import click

from gpuwarden.interfaces.cli.base import JSON, answer, cli, open_context, runs_async


@cli.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8741,
    show_default=True,
    help="Port to listen on; 0 selects a free one.",
)
@click.option(
    "--public-url", default="", metavar="URL", help="The https address of a reverse proxy in front of the server."
)
@click.option("--no-watch", is_flag=True, help="Don't start a watch, for example if another one is running.")
def serve(host: str, port: int, public_url: str, no_watch: bool) -> int:
    """Serve MCP, metrics and the web page over HTTP.

    Clients need a token from `gpuwarden token create`. `gpuwarden dashboard` gives a browser access.
    """
    from gpuwarden.interfaces.cli.admin import open_server
    from gpuwarden.interfaces.http.running import listen, run
    from gpuwarden.interfaces.http.serving import Serving, Settings

    Settings(host, port, public_url)  # refuse a public address before listening
    with contextlib.ExitStack() as listed, listen(host, port) as listener:
        ctx = open_server("http", "http", listed)
        settings = Settings(host, listener.getsockname()[1], public_url)
        text = f"gpuwarden listens on {settings.local_url} (MCP: {settings.local_url}/mcp)."
        run(Serving.over(ctx, settings), listener, watch=not no_watch, ready=lambda: click.echo(text, err=True))
    return 0


@cli.command()
@click.argument("path", default="/")
@click.option("--no-browser", is_flag=True, help="Print the link instead of opening it.")
@click.option("--public", is_flag=True, help="Print a link to the address in --public-url, for a phone.")
@JSON
def dashboard(path: str, no_browser: bool, public: bool, as_json: bool) -> int:
    """Open the running server's web page, at PATH if given.

    The link can be used once, within two minutes, and gives a browser read access.
    """
    from urllib.parse import quote

    from gpuwarden.core.errors import NotFound
    from gpuwarden.interfaces.http.record import running_server
    from gpuwarden.interfaces.http.tokens import TokenStore
    from gpuwarden.interfaces.results import Result
    from gpuwarden.people import current_user

    ctx = open_context()
    server = running_server(ctx.home)
    url = server.public_url.rstrip("/") if public else server.url
    if not url:
        raise NotFound("the server has no public address", "Start it with gpuwarden serve --public-url https://HOST.")
    link = f"{url}/enter?link={TokenStore(ctx.home, ctx.clock).create_link(current_user())}"
    if path != "/":
        link += f"&to={quote(path, safe='/')}"
    if no_browser or public or not _opened(link):
        click.echo(link)
        return 0
    return answer(Result(message=f"The page opens in your browser ({url})."), as_json, "message")


def _opened(link: str) -> bool:
    """Open a link in the user's browser through a private file, so that the link does not appear in a process list."""
    import html
    import tempfile
    import webbrowser

    with tempfile.NamedTemporaryFile("w", suffix=".html", prefix="gpuwarden-", delete=False, encoding="utf-8") as page:
        page.write(f'<!doctype html><meta http-equiv="refresh" content="0;url={html.escape(link)}">')
    return webbrowser.open(Path(page.name).as_uri())


@cli.group()
def token() -> None:
    """Create, list and revoke tokens for the server's clients."""


@token.command(name="create")
@click.argument("name")
@click.option(
    "--scope",
    "scopes",
    type=click.Choice(["read", "submit"]),
    multiple=True,
    default=("read",),
    show_default=True,
    help="The token's permissions; submit includes spending within your caps. No token can approve.",
)
@click.option(
    "--days",
    type=click.FloatRange(0, 366, min_open=True),
    default=30,
    show_default=True,
    help="Number of days until the token expires.",
)
@click.option("--person", default="", metavar="NAME", help="User on whose behalf the token acts; default: you.")
@JSON
@runs_async
async def create(name: str, scopes: tuple[str, ...], days: float, person: str, as_json: bool) -> int:
    """Create a token for one client, and show it once.

    The command asks the user for confirmation at a terminal, and for the PIN if one is set. The token appears only on
    that terminal.
    """
    from gpuwarden.interfaces.cli.tokens import create_token

    return answer(await create_token(open_context(), name, scopes, days, person=person), as_json, "message")


@token.command(name="list")
@JSON
def list_all(as_json: bool) -> int:
    """List the valid tokens, without their secrets."""
    from gpuwarden.interfaces.cli.tokens import list_tokens

    return answer(list_tokens(open_context()), as_json, "tokens")


@token.command()
@click.argument("name")
@JSON
def revoke(name: str, as_json: bool) -> int:
    """Revoke the token NAME; the next request with it is refused."""
    from gpuwarden.interfaces.cli.tokens import revoke_token

    return answer(revoke_token(open_context(), name), as_json, "message")
