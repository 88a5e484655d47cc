"""A short run of two ranks for compute-sanitizer: ``python sanitized_ranks.py FOLDER``."""

from __future__ import annotations

import sys

import gpu_ranks as ranks
from rank_pool import RankPool
from tail_cases import Case, assert_close

CASES = [
    Case(2, 64, top_k=2, seed=1),
    Case(3, 2880, top_k=4, row_padding=192, replicated=True, seed=2),
    Case(1, 64, routing="finalized", residual=False, seed=3),
    Case(5, 512, top_k=9, seed=4),
]


def main() -> None:
    """Run the cases twice, so that every slot is used again."""
    pool = RankPool(2, TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES="1")
    config = {"token_ceiling": 8, "peer_timeout_s": 60.0}
    try:
        pool.run(ranks.join, sys.argv[1], "store", config)
        reasons = pool.run(ranks.prepare, 2880, CASES[0].dtype)
        assert reasons == [None, None], reasons
        for got_by_rank in pool.run(ranks.run_cases, CASES * 2):
            for case, got in zip(CASES * 2, got_by_rank, strict=True):
                assert_close(case, got, 2)
        pool.run(ranks.leave)
        print("both ranks matched")
    finally:
        pool.close()


if __name__ == "__main__":
    main()
