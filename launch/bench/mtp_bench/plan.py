"""Which servers are started, and which are not, with the reason."""

from __future__ import annotations

from dataclasses import dataclass

from .drafts import Draft
from .modes import Mode
from .options import Options


@dataclass(frozen=True)
class Serving:
    """One server: a mode, and what it drafts."""

    mode: Mode
    draft: Draft | None

    @property
    def name(self) -> str:
        """Identifies it in the record: ``replay/chain4``, ``none``."""
        return self.mode.name if self.draft is None else f"{self.mode.name}/{self.draft.name}"

    @property
    def title(self) -> str:
        """For people: ``SGLang's verify, chain4``."""
        return self.mode.title if self.draft is None else f"{self.mode.title}, {self.draft.name}"


def plan(options: Options) -> tuple[list[Serving], dict[str, str]]:
    """The servers in the order they run, and the reason for every one that does not apply, by name."""
    servings: list[Serving] = []
    refused: dict[str, str] = {}
    for mode in options.modes:
        for draft in options.drafts if mode.speculates else (None,):
            serving = Serving(mode, draft)
            reason = mode.refusal(options.config, draft, options.algorithm, options.device)
            if reason is None:
                servings.append(serving)
            else:
                refused[serving.name] = reason
    return servings, refused
