"""`manyhands switch`: make a running member inert, or active again, without a restart."""

from typing import Annotated

import typer

from manyhands.cli import options
from manyhands.cli.client import Api, ApiKey, GatewayError, ask, print_json
from manyhands.errors import BadRequest


def switch(
    state: Annotated[str, typer.Argument(help="on or off.")],
    api: Api = "",
    api_key: ApiKey = "",
    as_json: options.Json = False,
) -> None:
    """Switch a running member off (it offers nothing, takes nothing, asks nothing) or on again.

    Its weights stay loaded and its links open; sessions on it are handed over to other nodes.
    """
    if state not in ("on", "off"):
        raise BadRequest(f"switch {state!r:.40}: it is on or off")
    try:
        told = ask(api, api_key, "POST", "/api/switch", {"on": state == "on"})
    except GatewayError as error:
        if error.http_status != 404:
            raise
        raise BadRequest("this gateway is of no member: `manyhands up` and `join` can be switched off") from error
    if as_json:
        print_json(told)
    else:
        typer.echo(f"this node is {'on' if told.get('on') else 'off'}")
