from tests.analysis.report.conftest import demo, hostile, nulls, read_page, rollout, sharing
from tests.loadtests.page.conftest import serve

__all__ = ["demo", "hostile", "nulls", "read_page", "rollout", "serve", "sharing"]
