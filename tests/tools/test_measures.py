"""tools.measures counts what its limits speak of."""

from tools.measures import Tree

LONG = "def long():\n" + "    x = 1\n" * 70
TWO = "class Shared:\n    pass\n\n\nclass _Own:\n    def short(self):\n        pass\n"


def test_measures_of_a_tree() -> None:
    tree = Tree()
    tree.add("a.py", LONG + TWO)
    tree.add("b.py", TWO + "# end\n" * 400)
    assert tree.twice == ["Shared"]
    assert tree.measures() == {
        "function lines, p90": 71,
        "function lines, longest": 71,
        "functions over 60 lines": 1,
        "file lines, longest": 407,
        "files over 350 lines": 1,
        "class names in several files": 1,
    }
