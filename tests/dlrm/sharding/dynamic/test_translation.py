"""A model with a dynamic table trains like one with a static table and translated ids."""

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from cpr.shards import find_shards, table_groups
from cpr.shards.lookups import watch_lookups
from dlrm.sharding.dynamic import make_dynamic
from dlrm.sharding.dynamic.index import initial_values
from tests.cpr.shards.models import CPU, DIM, META, bags, sequences, shard
from tests.dlrm.sharding.dynamic.models import SEED, batch, build, pooled, raw_ids, train

pytestmark = pytest.mark.usefixtures("world_of_one")

CAPACITY = 64
OPTIMIZERS = [EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD]


def shard_of(model, name):
    return next(found for found in find_shards(model) if found.table_fqn.endswith(f".{name}"))


@pytest.mark.parametrize("host", [False, True], ids=["fbgemm", "host"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda each: each.name)
def test_training_equals_a_static_table_bit_for_bit(optimizer, host):
    model, table = build(CAPACITY, optimizer=optimizer, host=host)
    outputs = train(model, range(12))
    dynamic = shard_of(model, "d")
    assert table.num_ids > 40

    def rows_of(numbers):
        return table.find(raw_ids(numbers))

    static, _ = build(CAPACITY, admit_after=0, optimizer=optimizer, host=host)
    plain = shard_of(static, "d")
    ids = dynamic.columns["id"]
    bound = CAPACITY**-0.5
    plain.weights.copy_(initial_values(ids, DIM, (-bound, bound), SEED, "d"))
    for ours, theirs in zip(outputs, train(static, range(12), ids_of=rows_of), strict=True):
        assert torch.equal(ours, theirs)
    used = dynamic.columns["last_seen"] > 0
    for name, column in plain.columns.items():
        assert torch.equal(dynamic.columns[name][used], column[used])
    for name, column in shard_of(static, "s").columns.items():
        assert torch.equal(shard_of(model, "s").columns[name], column)


@pytest.mark.parametrize("host", [False, True], ids=["fbgemm", "host"])
def test_ids_without_a_row_are_ignored(host):
    model, table = build(CAPACITY, admit_after=2, host=host)
    before = {name: column.clone() for name, column in shard_of(model, "d").columns.items()}
    (out,) = train(model, [0])
    known = table.find(raw_ids(torch.arange(60))) >= 0
    features = batch(0)
    lengths = [
        int(known[(raw_ids(torch.arange(60)) == each).nonzero()].item()) for each in features["f_d"].values()
    ]
    assert 0 < sum(lengths) < len(lengths)
    is_empty = torch.tensor(
        [not part.any() for part in torch.tensor(lengths).split(features["f_d"].lengths().tolist())]
    )
    assert out[is_empty, :DIM].eq(0).all()
    assert out[~is_empty, :DIM].ne(0).any(1).all()
    assert out[features["f_s"].lengths() > 0, DIM:].ne(0).any(1).all()
    touched = (shard_of(model, "d").weights != before["weights"]).any(1)
    assert torch.equal(
        touched.nonzero().squeeze(1), table.find(raw_ids(torch.arange(60)[known])).sort().values
    )


def test_evaluation_reads_rows_but_assigns_none():
    model, _ = build(CAPACITY)
    train(model, [0])
    columns = {name: column.clone() for name, column in shard_of(model, "d").columns.items()}
    with torch.no_grad():
        known = pooled(model, batch(0))
        pooled(model, batch(1))
    model.eval()
    assert torch.equal(pooled(model, batch(0)), known)
    assert known[:, :DIM].ne(0).any()
    for name, column in shard_of(model, "d").columns.items():
        assert torch.equal(column, columns[name])


def test_lookup_hooks_see_rows():
    model, table = build(CAPACITY, admit_after=2)
    seen = []
    with watch_lookups(list(table_groups(model)), lambda _, lookups: seen.append(lookups.rows)):
        train(model, range(4))
    touched = torch.zeros(CAPACITY + 20, dtype=torch.bool)
    for rows in seen:
        touched[rows] = True  # and none is out of bounds
    assert touched[:CAPACITY].sum() == table.num_ids > 10


def test_per_sample_weights_of_ids_without_a_row_are_ignored():
    model, _ = build(CAPACITY, admit_after=2)
    (group,) = table_groups(model)
    given = {
        "indices": torch.tensor([70, 80, 70, 3, 4]),
        "offsets": torch.tensor([0, 1, 3, 4, 5]),
        "per_sample_weights": torch.tensor([2.0, 3.0, 5.0, 7.0, 11.0]),
    }
    out = group.emb_module(**given)
    dynamic, static = shard_of(model, "d").weights[0], shard_of(model, "s").weights
    wanted = torch.stack([torch.cat([dynamic * 2, static[3] * 7]), torch.cat([dynamic * 5, static[4] * 11])])
    torch.testing.assert_close(out, wanted)


def test_features_that_share_a_table_share_its_rows():
    configs = [
        EmbeddingBagConfig(name="d", embedding_dim=DIM, num_embeddings=10, feature_names=["f", "g"]),
    ]
    model = shard({"d": "tw"}, ebc=EmbeddingBagCollection(device=META, tables=configs), device=CPU)
    (table,) = make_dynamic(model, {"d": 2}, SEED)
    features = KeyedJaggedTensor(
        keys=["f", "g"], values=torch.tensor([-9, 6, 6, -9]), lengths=torch.tensor([1, 1, 2, 0])
    )
    out = pooled(model, features)
    assert table.find(torch.tensor([-9, 6])).tolist() == [0, 1]
    weights = shard_of(model, "d").weights
    torch.testing.assert_close(out[0], torch.cat([weights[0], weights[1] + weights[0]]))
    torch.testing.assert_close(out[1], torch.cat([weights[1], torch.zeros(DIM)]))


@pytest.mark.parametrize(
    ("layout", "tables", "message"),
    [
        ({"d": "tw"}, {"e": 1}, "there is no table e to be dynamic; there are d"),
        ({"d": "rw"}, {"d": 1}, "planned row_wise: .* Plan it table_wise"),
        ({"d": "cw"}, {"d": 1}, "planned column_wise"),
        ({"d": "dp"}, {"d": 1}, "planned data_parallel"),
        ({"d": "unfused"}, {"d": 1}, "needs the compute kernel fused"),
        ({"d": "tw"}, {"d": 0}, "after 0 sightings; 1: at once"),
    ],
)
def test_tables_that_cannot_be_dynamic_are_refused(layout, tables, message):
    model = shard(layout, ebc=bags(d=12))
    with pytest.raises(ValueError, match=message):
        make_dynamic(model, tables, SEED)


def test_sequences_and_other_optimizers_are_refused():
    with pytest.raises(ValueError, match="pooling NONE; only sums"):
        make_dynamic(shard({"d": "tw"}, ebc=sequences(d=12)), {"d": 1}, SEED)
    with pytest.raises(ValueError, match="one of EXACT_SGD"):
        make_dynamic(
            shard({"d": "tw"}, EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD, ebc=bags(d=12)), {"d": 1}, SEED
        )
