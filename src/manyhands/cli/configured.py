"""Options whose default stands in the configuration (config_file.py), command by command."""

from typing import Any, Final

from manyhands.config_file import Settings

# command -> parameter -> (section, key)
_GATEWAY: Final = {"api": ("api", "url"), "api_key": ("api", "key")}
_HELD: Final = {"dtype": ("node", "dtype"), "cache_dtype": ("node", "cache_dtype")}
_HERE: Final = {name: ("node", name) for name in ("threads", "device")}
_ORIGIN: Final = {**_HELD, **_HERE, "ticket": ("swarm", "ticket")}
_ROUTE: Final = {
    **{name: ("request", name) for name in ("policy", "sticky", "own_first", "own_last", "fallback")},
    **{name: ("request", name) for name in ("mix_classes", "max_shards_per_request", "draft", "audit")},
    "allow_self": ("request", "allow_self_as_shard"),
}
_HOST: Final = {
    **_ORIGIN,
    **_ROUTE,
    **{name: ("node", name) for name in ("listen", "advertise", "name", "key", "ends")},
    **{name: ("worker", name) for name in ("max_sessions", "cache_tokens", "log_bytes")},
    "evict_after": ("worker", "evict_after_s"),
}
_MEMBER: Final = {
    **_ROUTE,
    **_HERE,
    **{name: ("node", name) for name in ("listen", "advertise", "name", "key", "memory", "relay")},
    **{name: ("node", name) for name in ("max_pipes", "strategy", "ends")},
    **{name: ("swarm", name) for name in ("scope", "allow", "deny")},
    "insecure": ("api", "insecure"),
}
CONFIGURED: Final[dict[str, dict[str, tuple[str, str]]]] = {
    "up": {
        **_MEMBER,
        **_HELD,
        "api": ("api", "listen"),
        "directory": ("swarm", "directory"),
    },
    "join": {**_MEMBER, "ticket": ("swarm", "ticket")},
    "serve": _HOST,
    "infer": {**_ORIGIN, **_ROUTE, **_GATEWAY},
    "chat": {**_ORIGIN, **_ROUTE, **_GATEWAY},
    "local": {
        **_ROUTE,
        **_HELD,
        **_HERE,
        "standby": ("request", "standby"),
    },
    "plan": {**_HELD, **_GATEWAY, "memory": ("node", "memory")},
    "status": _GATEWAY,
    "jobs": _GATEWAY,
    "benchmark": _GATEWAY,
    "switch": _GATEWAY,
    "page": {"api": ("api", "url")},
    "code": _GATEWAY,
    "workers": _GATEWAY,
    "workers evict": _GATEWAY,
    "workers readmit": _GATEWAY,
    "workers reassign": _GATEWAY,
}


def defaults(found: Settings) -> dict[str, Any]:
    """`found` as click's default_map: a table for each command, tables of its subcommands inside."""
    tables: dict[str, Any] = {}
    for command, parameters in CONFIGURED.items():
        table = tables
        for word in command.split():
            table = table.setdefault(word, {})
        for parameter, where in parameters.items():
            setting = found.get(*where)
            if setting.source != "default":
                table[parameter] = setting.value
    return tables
