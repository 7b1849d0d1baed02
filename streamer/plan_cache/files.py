"""Where recipes are kept: one file for each, named by what it is for."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import uuid
from pathlib import Path

from streamer.plan_cache.recipe import Recipe

__all__ = ["RecipeFiles"]

logger = logging.getLogger("streamer")

_FORMAT = 1
#: Files that are kept: of some models in some layouts, with as many ranks.
_MOST_FILES = 256


class RecipeFiles:
    """A folder of recipes. What cannot be read counts as missing, and what cannot be written is not kept: see the log.

    Args:
        folder: made when it is needed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, key: str) -> Recipe | None:
        """Return the recipe kept for `key`."""
        path = self._path(key)
        try:
            head, _, body = path.read_text().partition("\n")
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            logger.warning("cannot read the plan kept in %s, so this load is traced: %s", path, error)
            return None
        try:
            about = json.loads(head)
            if about["format"] != _FORMAT or about["key"] != key:
                raise ValueError("it is of another format or for something else")
            if about["sha256"] != hashlib.sha256(body.encode()).hexdigest():
                raise ValueError("it is damaged")
            recipe = Recipe.from_json(body)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            logger.warning("the plan kept in %s cannot be used, so this load is traced: %s", path, error)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # what is used is kept longest
        return recipe

    def keep(self, key: str, recipe: Recipe) -> bool:
        """Keep `recipe` for `key`; return whether that could be done."""
        body = recipe.to_json()
        about = {"format": _FORMAT, "key": key, "sha256": hashlib.sha256(body.encode()).hexdigest()}
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            unfinished = self._folder / f".{uuid.uuid4().hex}"
            try:
                unfinished.write_text(f"{json.dumps(about)}\n{body}")
                unfinished.replace(self._path(key))
            finally:
                unfinished.unlink(missing_ok=True)
            self._drop_oldest()
        except OSError as error:
            logger.warning("cannot keep the plan of this load in %s: %s", self._folder, error)
            return False
        return True

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.json"

    def _drop_oldest(self) -> None:
        """Drop the files that were used longest ago; other processes may do the same meanwhile."""
        used = []
        for path in self._folder.glob("*.json"):
            with contextlib.suppress(FileNotFoundError):
                used.append((path.stat().st_mtime, path))
        for _, path in sorted(used)[:-_MOST_FILES]:
            path.unlink(missing_ok=True)
