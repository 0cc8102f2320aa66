"""`midstream serve` with short terms of leases, for tests that cannot wait for minutes: `python -m tests.pool_child …`.

Everything else is the product's own.  Terms are constants of the protocol, so they are changed before they are read.
"""

from __future__ import annotations

import sys

from midstream import wire

TERM, SWEEP = 3, 0.25

wire.POOL_LEASE_TERM = TERM  # type: ignore[misc]  # constant everywhere but here
wire.POOL_SWEEP_EVERY = SWEEP  # type: ignore[misc]

if __name__ == "__main__":
    from midstream.cli import main

    sys.exit(main())
