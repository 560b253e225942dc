"""docs/configuration.md, Names in other systems: every key of the five sources has its counterpart or a sentence why not."""

import dataclasses
import re
from pathlib import Path
from typing import Final

import pytest

from manyhands.config_file import SECTIONS
from tests.test_features import check_command

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"
# What the sources document (ledger of requirements: HN-41 to HN-43, IN-R02, IN-R03, L9-R04, SH-R01, SH-R02, LP-11 to LP-15,
# LP-23, LP-R03). A row may name several.
KEYS: Final = {
    "HearthNet": """enabled policy.research.enable backend max_shards_per_request shard_health_timeout_seconds fallback_to_local
        activation_dtype allow_self_as_shard max_concurrent_pipelines host.serve_shards host.shard_eviction_idle_seconds
        host.shard_max_vram_mb""",
    "InferD": "model_name parts_dir stages_count stages nodes NODE_IP NODE_NAME INITIAL_STAGE BOOTSTRAP_NODES",
    "lattice9": "MODEL_NAME WORKER_ID WORKER_PORT WORKER_HOST COORDINATOR_URL SHED_WEIGHTS TORCH_THREADS",
    "Shard": "SHARD_PSK K depth prefill_depth drafter",
    "Language Pipes": """node_id layer_models[].model_id layer_models[].id layer_models[].device layer_models[].memory
        layer_models[].max_memory layer_models[].data_type end_models[].model_id end_models[].num_local_layers
        end_models[].device job_port api_keys max_node_jobs max_api_jobs peer_port network_ip bootstrap_nodes network_key
        whitelist_node_ids prefill_chunk_size max_pipes model_validation LP_APP_DIR LP_MODEL_DIR token""",
}


def table() -> dict[str, dict[str, str]]:
    """Our side of each key, by system."""
    found: dict[str, dict[str, str]] = {}
    text = PAGE.read_text("utf8").partition("## Names in other systems")[2]
    for line in text.splitlines():
        if system := re.match(r"\| \*\*(.+?)\*\*", line):
            rows = found.setdefault(system[1], {})
        elif found and line.startswith("| "):
            theirs, ours = (cell.strip() for cell in line.strip("|").split("|"))
            for key in re.findall(r"`([^`]+)`", theirs):
                rows[key] = ours
    return found


@pytest.mark.parametrize("system", KEYS)
def test_every_key_has_a_row(system: str) -> None:
    wanted, rows = KEYS[system].split(), table()[system]
    assert [key for key in wanted if key not in rows] == []
    assert set(rows) - set(wanted) - {"globals.toml"} == set()


def test_a_row_names_a_key_of_ours_a_command_or_says_why_not() -> None:
    ours = {f"{section}.{field.name}" for section, kind in SECTIONS.items() for field in dataclasses.fields(kind)}
    for system, rows in table().items():
        for key, cell in rows.items():
            names = re.findall(r"`([^`]+)`", cell)
            dotted = [name for name in names if re.fullmatch(r"[a-z]+\.[a-z_A-Z]+", name)]
            assert set(dotted) <= ours, f"{system} {key}: no key {set(dotted) - ours}"
            commands = [name for name in names if name.startswith("manyhands ")]
            for command in commands:
                check_command(command)
            is_said = cell.startswith("- : ") and len(cell) > len("- : there is one")
            assert dotted or commands or is_said, f"{system} {key}: neither a counterpart nor a reason"
