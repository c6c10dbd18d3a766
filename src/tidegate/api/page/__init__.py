"""The page at `/`: live flights, the waterfall of one, and a box to ask. Server-rendered, no build step, works without internet."""

from tidegate.api.page.deps import CapabilityView, PageDeps
from tidegate.api.page.routes import Page
from tidegate.api.page.session import same_origin, session_caller
from tidegate.api.page.tokens import OneTimeTokens, TokenFolder


def create_page(deps: PageDeps) -> Page:
    """The page over `deps`: include `page.router` into the app, call `page.close()` when the server begins to stop."""
    return Page(deps)


__all__ = ["CapabilityView", "OneTimeTokens", "Page", "PageDeps", "TokenFolder", "create_page", "same_origin", "session_caller"]
