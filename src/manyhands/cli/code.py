"""`manyhands code`: show the code by which a machine of the same network joins, from the member that runs here."""

import sys
from typing import Annotated, Any

import typer

from manyhands.cli import options
from manyhands.cli.client import ApiKey, GatewayError, call, print_json, running_api
from manyhands.cli.lines import fitted
from manyhands.cli.progress import doing
from manyhands.cli.status import Swarm
from manyhands.errors import BadRequest


def code(
    new: Annotated[bool, typer.Option("--new", help="A new one, though another is shown.")] = False,
    off: Annotated[bool, typer.Option("--off", help="Show none any more.")] = False,
    api: Swarm = "",
    api_key: ApiKey = "",
    as_json: options.Json = False,
) -> None:
    """Show the six characters that `manyhands join` asks for on another machine of this network.

    The code that is shown already, or else a new one; it is good for ten minutes and three wrong tries.
    """
    if new and off:
        raise BadRequest("--new shows a code and --off shows none: give one of the two")
    where = api or running_api()
    with doing(f"asking the gateway at {where}"):
        told = _told(where, api_key, new=new, off=off)
    if as_json:
        print_json({"swarm": told["swarm"], "code": told["code"]})
    else:
        typer.echo(fitted(say_code(told["code"]), sys.stdout))


def _told(api: str, key: str, *, new: bool, off: bool) -> dict[str, Any]:
    """What the member behind `api` shows after that. Raises BadRequest for a gateway of no member, and as call."""
    try:
        told: dict[str, Any] = {"code": None} if new else call(api, key, "GET", "/api/invite")
        if off:
            told = call(api, key, "DELETE", "/api/invite/code")
        elif told["code"] is None:
            told = call(api, key, "POST", "/api/invite/code")
    except GatewayError as error:
        if error.http_status != 404:
            raise
        raise BadRequest(f"the gateway at {api} is of no member: `manyhands up` and `join` show codes") from error
    return told


def say_code(told: dict[str, Any] | None) -> str:
    """What `up` and `manyhands code` say of a code (member/invite.py, told)."""
    if told is None:
        return "no code is shown: manyhands code shows one"
    minutes, tries = max(1, round(told["seconds_left"] / 60)), told["tries_left"]
    return (
        f"on another machine of this network:  manyhands join     code  {told['code']}\n"
        f"  good for {minutes} {'minute' if minutes == 1 else 'minutes'} and {tries} wrong "
        f"{'try' if tries == 1 else 'tries'}; `manyhands code` shows it again, or a new one"
    )
