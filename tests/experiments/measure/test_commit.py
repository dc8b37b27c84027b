"""The commit of a checkout, of a stamped copy, and of one whose sources changed after it was sent."""

import shutil

import pytest
from fakes import git

from experiments.measure.commit import STAMP, commit, write_stamp
from experiments.measure.records import RowsError


@pytest.fixture
def checkout(tmp_path):
    root = tmp_path / "checkout"
    for name, text in {"punica/a.py": "A = 1\n", "conf/b.yaml": "b: 1\n", ".gitignore": f"{STAMP}\n"}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "one")
    return root


def of(root):
    commit.cache_clear()
    return commit(root)


def sent(checkout):
    write_stamp(checkout)
    return shutil.copytree(checkout, checkout.parent / "copy", ignore=shutil.ignore_patterns(".git"))


def test_a_checkout_tells_its_commit_and_whether_it_is_dirty(checkout):
    head = git(checkout, "rev-parse", "--short=12", "HEAD")
    assert of(checkout) == head
    (checkout / "punica" / "new.py").write_text("")
    assert of(checkout) == f"{head}-dirty"


def test_a_copy_has_the_commit_of_its_stamp_until_a_source_changes(checkout):
    copy = sent(checkout)
    assert of(copy) == of(checkout)
    (copy / "punica" / "__pycache__").mkdir()
    (copy / "punica" / "__pycache__" / "a.py").write_text("compiled")
    (copy / "outputs.csv").write_text("rows")
    assert of(copy) == of(checkout)
    (copy / "conf" / "b.yaml").write_text("b: 2\n")
    assert of(copy) == of(checkout) + "-dirty"
    (copy / "conf" / "b.yaml").rename(copy / "conf" / "c.yaml").write_text("b: 1\n")
    assert of(copy).endswith("-dirty"), "the name counts"


def test_a_copy_with_the_history_of_an_older_commit_has_that_of_its_stamp(checkout):
    older = shutil.copytree(checkout, checkout.parent / "older")
    (checkout / "conf" / "b.yaml").write_text("b: 2\n")
    git(checkout, "commit", "-aqm", "two")
    shutil.copytree(sent(checkout), older, dirs_exist_ok=True)
    assert of(older) == of(checkout)
    (older / "punica" / "a.py").write_text("A = 2\n")
    assert of(older) == git(checkout, "rev-parse", "--short=12", "HEAD~1") + "-dirty"


def test_a_copy_with_the_history_of_its_commit_may_lack_what_is_no_source(checkout):
    (checkout / "results.csv").write_text("rows")
    git(checkout, "add", "-A")
    git(checkout, "commit", "-qm", "two")
    write_stamp(checkout)
    head = of(checkout)
    (checkout / "results.csv").unlink()
    assert of(checkout) == head
    (checkout / "punica" / "a.py").write_text("A = 2\n")
    assert of(checkout) == f"{head}-dirty"


def test_a_copy_without_stamp_is_of_no_commit_even_inside_another_checkout(checkout):
    inside = checkout / "copies" / "one"
    shutil.copytree(checkout / "punica", inside / "punica")
    assert of(inside) == "unknown"


def test_a_dirty_tree_and_a_copy_are_not_stamped(checkout):
    with pytest.raises(RowsError, match="has no git history: stamp the checkout"):
        write_stamp(sent(checkout))
    (checkout / STAMP).unlink()
    (checkout / "conf" / "b.yaml").write_text("b: 2\n")
    with pytest.raises(RowsError, match=r"1 files differ from commit \w{12} \(M conf/b.yaml\): commit them"):
        write_stamp(checkout)
    assert not (checkout / STAMP).exists()
