"""tools/mutate.py: the list fits the code."""

from pathlib import Path

import pytest

from tools.mutate import MUTATIONS, ROOT, Mutation, mutated


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_what_a_mutation_replaces_stands_once_and_its_tests_exist(mutation: Mutation) -> None:
    assert mutated(mutation) != (ROOT / "src/manyhands" / mutation.file).read_text("utf8")
    compile(mutated(mutation), mutation.file, "exec")
    assert mutation.tests
    for file, _, name in (test.partition("::") for test in mutation.tests):
        assert (f"def {name}(" if name else "def test_") in (ROOT / "tests" / file).read_text("utf8")


def test_a_mutation_that_fits_nowhere_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "src/manyhands").mkdir(parents=True)
    (tmp_path / "src/manyhands/a.py").write_text("x = 1\nx = 1\n")
    for old in ("x = 1", "y = 1"):
        with pytest.raises(ValueError, match=r"stands [02] times in a\.py"):
            mutated(Mutation("m", "a.py", old, "", ()), tmp_path)
