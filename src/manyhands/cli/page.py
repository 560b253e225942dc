"""`manyhands page`: where the page of a gateway of this machine is, and a link that signs its owner in there, once."""

import sys
from typing import NamedTuple
from urllib.parse import urlsplit

import typer

from manyhands.api.http.hosts import is_loopback
from manyhands.cli import options
from manyhands.cli.client import call, check_address, print_json, running_api
from manyhands.cli.lines import fitted
from manyhands.cli.owner import owner_secret
from manyhands.cli.progress import doing
from manyhands.cli.status import Swarm
from manyhands.config import home_from_env
from manyhands.errors import BadRequest

LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "::1": "[::1]"}


class PageLink(NamedTuple):
    """The whole address, and how long it is good for."""

    url: str
    seconds: float


def page(api: Swarm = "", as_json: options.Json = False) -> None:
    """Print a link to the page that signs in who opens it, as the owner of this machine.

    It is good once, for ten minutes, in a browser of this machine.
    """
    where = api or running_api()
    with doing(f"asking the gateway at {where}"):
        link = page_link(where)
    if as_json:
        print_json({"url": link.url, "seconds": link.seconds})
        return
    typer.echo(link.url)
    typer.secho(fitted(f"  signs you in as the owner; {good_for(link)}", sys.stderr), dim=True, err=True)


def page_link(api: str) -> PageLink:
    """A new link to the page of the gateway at `api`. Raises BadRequest if that is not this user's on this machine; as call."""
    check_address(api)
    home, is_here = home_from_env(), is_loopback(urlsplit(api).hostname or "")
    if owner_secret(home, api) is None and is_here:
        call(api, "", "GET", "/health")  # raises if there is none
    if owner_secret(home, api) is None:  # it may have started meanwhile
        raise BadRequest(
            f"the gateway at {api} is not of this user on this machine: open {api}/ and sign in with an admin's key, "
            "which its owner makes there (manyhands key add NAME --admin)"
        )
    told = call(api, "", "POST", "/api/session/link")
    url = urlsplit(api)
    host = LOOPBACK.get(str(url.hostname), str(url.hostname))
    port = f":{url.port}" if url.port else ""
    return PageLink(f"{url.scheme}://{host}{port}/{told['fragment']}", float(told["seconds"]))


def good_for(link: PageLink) -> str:
    """What to know of a link, in a line."""
    return f"good once, within {link.seconds / 60:.0f} minutes, in a browser of this machine"
