"""The standard library, split: nothing that judges a model stands in what it learns from."""

import shutil

import pytest

from checkpoints.recipe.corpus import (
    HELD_OUT,
    NEAR,
    Document,
    concerns_held_out,
    drop_copies,
    read_corpus,
    running_library,
    windows,
)


@pytest.fixture(scope="module")
def corpus():
    return read_corpus([running_library()])


def test_modules_are_on_one_side(corpus):
    assert {document.module for document in corpus.held} == HELD_OUT
    assert not HELD_OUT & {document.module for document in corpus.train}


def test_no_test_is_held_out_and_no_test_of_what_is_held_out_is_learned(corpus):
    assert not [document.name for document in corpus.held if "test" in document.name]
    assert not [document.name for document in corpus.train if concerns_held_out(document.name)]


def test_almost_no_text_of_the_held_out_modules_is_learned(corpus):
    learned = {window for document in corpus.train for window in windows(document.text)}
    held = [windows(document.text) for document in corpus.held]
    shared = sum(len(own & learned) for own in held)
    assert shared <= 0.0005 * sum(map(len, held))


def test_sizes_are_about_what_the_recipe_says(corpus):
    assert 1e6 < sum(len(document.text) for document in corpus.held) < 1.4e6
    assert 20e6 < sum(len(document.text) for document in corpus.train) < 40e6


@pytest.mark.parametrize(
    ("name", "concerns"),
    [
        ("argparse.py", True),
        ("json/decoder.py", True),
        ("test/test_json/test_dump.py", True),
        ("test/test_ast.py", True),
        ("test/test_subprocess.py", True),
        ("test/test_logging_extra.py", True),
        ("idlelib/idle_test/test_calltip.py", False),
        ("asyncio/subprocess.py", False),  # another module; were it a copy, it would be dropped
        ("test/test_jsonlike.py", False),
        ("test/_test_multiprocessing.py", False),
    ],
)
def test_names_that_concern_held_out_modules(name, concerns):
    assert concerns_held_out(name) == concerns


def text_of(*numbers):
    return "\n".join(f"line {number}\n" for number in numbers)


def test_copies_and_neighbours_of_held_out_text_are_dropped():
    held = Document("json.py", text_of(*range(1000, 1100)))
    first = Document("a.py", text_of(*range(100)))
    indented = Document("b.py", first.text.replace("line", "    line"))
    rewritten = Document("c.py", text_of(*range(30), *range(200, 270)))
    near = Document("d.py", text_of(*range(300, 390), *range(1000, 1010)))
    assert NEAR < 6 / 96
    kept = drop_copies([first, first, indented, rewritten, near], [held])
    assert kept == [first, rewritten]


def test_a_second_library_adds_only_what_is_new(corpus, tmp_path):
    kept = corpus.train[0]
    (tmp_path / "json.py").write_text(text_of(*range(50)))
    (tmp_path / "copy_of_one.py").write_text(kept.text)
    (tmp_path / "brand_new.py").write_text(text_of(*range(40)))
    more = read_corpus([running_library(), tmp_path])
    assert [document.name for document in more.train[len(corpus.train) :]] == ["brand_new.py"]
    assert more.held == corpus.held


def test_a_library_without_the_held_out_modules_is_refused(tmp_path):
    shutil.copy(running_library() / "csv.py", tmp_path)
    with pytest.raises(ValueError, match=r"lacks the held-out modules \['argparse', 'ast'"):
        read_corpus([tmp_path])
