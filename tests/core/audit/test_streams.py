"""No two purposes of an audit draw the same numbers, nor does an audit draw those of another stage."""

import numpy as np

from gradtrail.core.audit.streams import Stream, stream


def test_no_two_streams_coincide() -> None:
    drawn = {
        (of, which): stream(0, of, *which).generate_state(4).tobytes()
        for of in Stream
        for which in [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]
    }
    others = {
        np.random.SeedSequence(seed).generate_state(4).tobytes() for seed in (0, (0, 0), (0, 1), (0, 2), (0, 2, 1))
    }
    assert len(set(drawn.values())) == len(drawn)
    assert not others & set(drawn.values())


def test_a_stream_is_drawn_again_from_its_seed_alone() -> None:
    first, again, other = (np.random.default_rng(stream(seed, Stream.FOLDS, 1)).random() for seed in (3, 3, 4))
    assert first == again != other
