from typing import Literal

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "receive", "broadcast"]
