"""The page of an atlas as tests open it: the atlas that they look at, and how they go through its heads."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from attnscope.pages import page_of_record
from attnscope.questions.atlas import Atlas
from tests.atlas_helpers import examples_of, places_of, small_atlas
from tests.findings_helpers import described_findings
from tests.page_helpers import Opened, page_opener

FINDINGS = described_findings(3, 4)
ATLAS = small_atlas(3, 4, n_tokens=24, findings=FINDINGS)
NAMES = [head.name for head in places_of(ATLAS)]
EXAMPLES = examples_of(ATLAS)

CONDITIONS = json.loads(Path(__file__).with_name("conditions.json").read_text(encoding="utf-8"))
"""Conditions, and the heads of ATLAS for which each holds in the filter box."""


def mine(head: str, why: str) -> list[Any]:
    """The examples of a head that are shown for a reason, such as "top"."""
    return [one for one in EXAMPLES if NAMES[one.wanted.head] == head and one.wanted.why == why]


class OpenedAtlas(Opened):
    """A page of an atlas."""

    def settle(self, view: str) -> None:
        """Waits until a view stands."""
        super().settle("atlas" if view == "grid" else view)

    def go(self, head: str = "", **state: object) -> None:
        """Goes to a head, or to the landing."""
        self.show(**({"v": "head", "head": head} if head else {"v": "atlas"}), **state)
        if head:
            self.page.wait_for_selector(f".view.head[data-shown='{head}']")

    def listed(self) -> list[str]:
        """The names of the heads in the list, those in sight."""
        return self.page.eval_on_selector_all(".rows .row b", "all => all.map(b => b.textContent)")

    def shown(self) -> int:
        """How many heads pass filter and brush."""
        return int(self.page.get_attribute(".view.atlas", "data-shown") or -1)


@pytest.fixture
def open_atlas(open_page: Callable[..., Any]) -> Callable[[Atlas], OpenedAtlas]:
    """Opens the page of an atlas; see `open_page`."""
    return lambda atlas: open_page(page_of_record(atlas), OpenedAtlas)


@pytest.fixture(scope="module")
def _opened(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenedAtlas]:
    with page_opener(browser, tmp_path_factory.mktemp("atlas")) as open_page:
        yield open_page(page_of_record(ATLAS), OpenedAtlas)
