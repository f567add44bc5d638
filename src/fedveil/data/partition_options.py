"""The options of each kind of partition; unknown keys are refused."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1, strict=True)]
Index = Annotated[int, Field(ge=0, strict=True)]
Positive = Annotated[float, Field(gt=0, strict=True, allow_inf_nan=False)]
TooSmall = Literal["resample", "top-up"]


class Options(BaseModel):
    """The option that all kinds share: the number of clients."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    clients: Count


class Iid(Options):
    """Uniformly at random, sizes equal within one.

    examples_per_client: exactly so many each; None deals everything out.
    """

    kind: Literal["iid"] = "iid"
    examples_per_client: Count | None = None


class Dirichlet(Options):
    """Split each label in proportions drawn from a symmetric Dirichlet distribution over the clients (Hsu et al. 2019).

    alpha: concentration; small is uneven. min_size: fewest examples a client may have; 0 allows clients without data.
    too_small: what to do while a client has fewer: draw again (at most max_tries times), or take from the largest clients.
    """

    kind: Literal["dirichlet"] = "dirichlet"
    alpha: Positive
    min_size: Index = 1
    too_small: TooSmall = "resample"
    max_tries: Count = 1000


class Shards(Options):
    """Sort by label, cut into clients * per_client shards of equal size within one, hand out the shards (McMahan et al. 2017)."""

    kind: Literal["shards"] = "shards"
    per_client: Count = 2


class LabelCount(Options):
    """Every client has exactly `labels_per_client` labels; a label's examples are shared equally among those who hold it."""

    kind: Literal["label-count"] = "label-count"
    labels_per_client: Count


class Users(BaseModel):
    """Natural users as clients; with fewer clients than users, a random choice of users.

    clients: None means all users.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    kind: Literal["users"] = "users"
    clients: Count | None = None


class Isolation(Options):
    """IID with equal sizes, except that the curious client has no example of the private label (LaDP-FL, section VII-A).

    private_label: the label; curious: index of the curious client. examples_per_client: exactly so many each; None deals
    everything out.
    """

    kind: Literal["private-label-isolation"] = "private-label-isolation"
    private_label: Index
    curious: Index = 0
    examples_per_client: Count | None = None


class Ladp1(Options):
    """LaDP-FL's Distribution I: few labels each, equal sizes, the private label with everyone but the curious client.

    labels_per_client: the private one included; the curious client has one fewer, all public.
    private_share: share of the private label in a client's examples; None is its share of the data set. Not stated in the
    paper; 1 / labels_per_client gives every label the same share but leaves most public examples unused.
    examples_per_client: None is the largest size that the data set allows.
    """

    kind: Literal["ladp-1"] = "ladp-1"
    private_label: Index
    clients: Count = 100
    curious: Index = 0
    labels_per_client: Annotated[int, Field(ge=2, strict=True)] = 4
    private_share: Annotated[float, Field(gt=0, lt=1, strict=True)] | None = None
    examples_per_client: Count | None = None


class Ladp2(Options):
    """LaDP-FL's Distribution II: Dirichlet for each public label over all clients, for the private label over all others.

    private_alpha: None is alpha. min_size: fewest examples a client may have, taken from the largest clients where the draw
    gives fewer; not stated in the paper, where alpha = 0.01 alone leaves most of 100 clients without data.
    """

    kind: Literal["ladp-2"] = "ladp-2"
    private_label: Index
    clients: Count = 100
    curious: Index = 0
    alpha: Positive = 0.01
    private_alpha: Positive | None = None
    min_size: Index = 1


AnyPartition = Annotated[Iid | Dirichlet | Shards | LabelCount | Users | Isolation | Ladp1 | Ladp2, Field(discriminator="kind")]
PARTITIONS: dict[str, type[BaseModel]] = {
    model.model_fields["kind"].default: model for model in get_args(get_args(AnyPartition)[0])
}
