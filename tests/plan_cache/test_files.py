"""Plans on disk: written whole or not at all, and never believed when something is wrong with them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

import streamer
from streamer.errors import LoadError
from streamer.plan_cache import files
from streamer.plan_cache.expressions import Expression, Geometry, Source
from streamer.plan_cache.files import RecipeFiles
from streamer.plan_cache.recipe import Attribute, CopyStep, FillStep, Recipe
from streamer.report import PlanCacheUse
from tests.plan_cache.models import KEPT, STATE, USED, Columns, load
from tests.trace.loading import source_of

VECTOR = Geometry(torch.float32, (6,), (1,), 0)
PART = Geometry(torch.bfloat16, (2, 3), (8, 1), 5)
RECIPE = Recipe(
    steps=(
        CopyStep(
            1, Source("a", Geometry(torch.bfloat16, (2, 3), (8, 1), 5)), "w", Geometry(torch.uint8, (2, 3), (3, 1), 1)
        ),
        FillStep(1, "w", VECTOR, 0.1),
        CopyStep(4, Source(1, VECTOR), "w", VECTOR),
        FillStep(5, "x", Geometry(torch.bool, (), (), 7), True),
    ),
    asked=5,
    returned={"w", "x"},
    attributes=(Attribute("layers.0", "is_ready", "True"),),
    looked_at=("b",),
    expressions=(
        Expression("aten::neg.default", {"tuple": [{"tuple": [{"source": 0}]}, {"dict": []}]}, (Source("a", VECTOR),)),
        Expression(
            "aten::cat.default",
            {"tuple": [{"tuple": [{"list": [{"source": 0}, {"source": 1}]}, -1]}, {"dict": []}]},
            (Source(0, VECTOR), Source("c", VECTOR)),
        ),
    ),
)


def test_a_recipe_is_read_as_it_was_written(tmp_path: Path) -> None:
    store = RecipeFiles(tmp_path)
    assert store.read("k") is None
    assert store.keep("k", RECIPE)
    assert store.read("k") == RECIPE
    assert [path.name for path in tmp_path.iterdir()] == ["k.json"]


@pytest.mark.parametrize("returned", [None, [], ["b", "a"], ("a",), frozenset({"a"}), set()])
def test_whatever_was_returned(returned: list[str] | None) -> None:
    again = Recipe.from_json(Recipe((), 1, returned).to_json())
    assert again.returned == returned
    assert type(again.returned) is type(returned)


def damage(path: Path, how: str) -> None:
    head, _, body = path.read_text().partition("\n")
    about = json.loads(head)
    if how == "a byte":
        body = body.replace("norm", "mron")
    elif how == "cut short":
        body = body[:-5]
    elif how == "no text":
        path.write_bytes(b"\xff\xfe\x00")
        return
    elif how == "empty":
        head = body = ""
    elif how == "another format":
        head = json.dumps({**about, "format": 0})
    elif how == "another load's":
        head = json.dumps({**about, "key": "0" * 64})
    else:
        path.unlink()
        path.mkdir()
        return
    path.write_text(f"{head}\n{body}")


@pytest.mark.parametrize(
    "how", ["a byte", "cut short", "no text", "empty", "another format", "another load's", "a folder"]
)
def test_a_damaged_file_is_not_believed(tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
    load(tmp_path, Columns())
    (path,) = (tmp_path / "plans").iterdir()
    damage(path, how)
    model = Columns()
    report = load(tmp_path, model)
    if how == "a folder":
        assert report.plan_cache == PlanCacheUse("not used", "it could not be kept, see the log")
    else:
        assert report.plan_cache == KEPT
        assert load(tmp_path, Columns()).plan_cache == USED
    assert torch.equal(model.norm, STATE["norm"])
    assert next(record.levelname for record in caplog.records if str(path) in record.getMessage()) == "WARNING"


def test_a_folder_that_cannot_be_written_to_costs_no_load(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "plans").write_text("a file")
    model = Columns()
    assert load(tmp_path, model).plan_cache == PlanCacheUse("not used", "it could not be kept, see the log")
    assert torch.equal(model.norm, STATE["norm"])
    assert "cannot keep the plan of this load" in caplog.text


def test_what_was_used_longest_ago_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_MOST_FILES", 3)
    store = RecipeFiles(tmp_path)
    for number, key in enumerate("abc"):
        store.keep(key, RECIPE)
        os.utime(tmp_path / f"{key}.json", (number, number))
    assert store.read("a") is not None
    store.keep("d", RECIPE)
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["a", "c", "d"]


def _rewrite(folder: Path, old: str, new: str) -> None:
    """Change a plan, and its digest with it."""
    (path,) = (folder / "plans").iterdir()
    body = path.read_text().partition("\n")[2]
    assert old in body
    RecipeFiles(folder / "plans").keep(path.stem, Recipe.from_json(body.replace(old, new)))


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('"norm"', '"mron"', "the model has no mron"),
        ('["float32",[4,6],[6,1]]', '["float32",[40,6],[6,1]]', "one of its copies ends at"),
    ],
)
def test_a_plan_that_does_not_fit_changes_nothing(tmp_path: Path, old: str, new: str, why: str) -> None:
    load(tmp_path, Columns())
    _rewrite(tmp_path, old, new)
    model = Columns()
    with pytest.raises(LoadError, match="plan that was kept of an earlier load does not fit") as raised:
        load(tmp_path, model)
    assert why in str(raised.value)
    assert (model.norm == -1).all()
    assert (model.column == -1).all()
    load(tmp_path, model, plan_cache=False)
    assert torch.equal(model.norm, STATE["norm"])


def test_sources_beyond_the_checkpoint_are_refused(tmp_path: Path) -> None:
    load(tmp_path, Columns())
    (path,) = (tmp_path / "plans").iterdir()
    recipe = Recipe.from_json(path.read_text().partition("\n")[2])
    far = Source("norm", Geometry(torch.float32, (6,), (1,), 1))
    for source in (far, Source("nothing", VECTOR), Source(3, VECTOR)):
        steps = (CopyStep(1, source, "norm", VECTOR),)
        RecipeFiles(tmp_path / "plans").keep(path.stem, Recipe(steps, recipe.asked, recipe.returned))
        with pytest.raises(LoadError, match="does not fit"):
            load(tmp_path, Columns())


def test_a_relative_cache_folder_and_the_default_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("S3STREAM_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    config = {"plan_cache": True, "strict": False}
    assert streamer.load(Columns(), source_of(STATE), config).plan_cache == KEPT
    assert len(list((tmp_path / "xdg" / "s3stream" / "plans").iterdir())) == 1
    assert streamer.load(Columns(), source_of(STATE), {**config, "cache_dir": "here"}).plan_cache == KEPT
    assert len(list((tmp_path / "here" / "plans").iterdir())) == 1
