"""Uploads in a row, and compression beyond tests/replay: what is kept, chance, what it costs, buffers."""

import torch
from lightning.pytorch.callbacks import LambdaCallback

from flsv.attacks import Scaling
from flsv.core import Traffic
from flsv.federation import FederatedLoop
from flsv.personalization import FedAMP, Standalone
from flsv.uploads import TopK, Upload, UploadContext, upload
from helpers import make_generator, refused, warns
from helpers.fits import client_tensors, fit
from helpers.models import Diverges, network, sgd

VECTOR = torch.tensor([5.0, 7.0])
START = torch.tensor([1.0, 2.0])
GLOBAL = torch.tensor([0.0, 3.0])

CONTEXT = UploadContext(
    client=1,
    num_clients=3,
    num_parameters=2,
    round_index=4,
    seed=9,
)


class HalvesAndRecords(Upload):
    """Halves an update, and keeps a list of the updates that came in."""

    def __init__(self, reference="start", numbers=0):
        self.reference = reference
        self.numbers = numbers
        self.updates = []
        self.positions = []

    def apply(self, update, context):
        self.updates.append(update.clone())
        self.positions.append(context.position)
        return update / 2

    def traffic(self, previous, sent, context):
        assert torch.equal(sent, self.updates[-1] / 2)
        return previous + Traffic(self.numbers, 0.5)


def test_each_upload_in_a_chain_refers_to_its_own_reference():
    chain = [HalvesAndRecords("start"), HalvesAndRecords("global"), HalvesAndRecords("start")]

    sent, _ = upload(chain, VECTOR, START, GLOBAL, CONTEXT)

    # Each upload halves the vector's update from its reference, and sends the reference plus that half.
    first_update = VECTOR - START
    first_vector = START + first_update / 2
    second_update = first_vector - GLOBAL
    second_vector = GLOBAL + second_update / 2
    third_update = second_vector - START
    third_vector = START + third_update / 2

    for recorder, update in zip(chain, (first_update, second_update, third_update)):
        (recorded_update,) = recorder.updates
        assert torch.equal(recorded_update, update)
    assert torch.equal(sent, third_vector)
    assert [recorder.positions for recorder in chain] == [[0], [1], [2]]


def test_update_that_no_upload_concerns_is_sent_unchanged_and_counted_whole():
    vector = torch.rand(1000)
    tripled = Scaling(3.0, clients=[0])

    sent, traffic = upload(
        [tripled],
        vector,
        torch.rand(1000),
        vector,
        CONTEXT,
    )
    _, traffic_of_doubles = upload(
        [],
        vector.double(),
        vector,
        vector,
        CONTEXT,
    )

    assert sent is vector
    assert traffic == Traffic(1000, 4000.0)
    assert traffic_of_doubles == Traffic(1000, 8000.0)


def test_upload_context_has_the_client_and_round_and_traffic_is_counted(tmp_path):
    contexts = []

    class CountsVisits(HalvesAndRecords):
        def apply(self, update, context):
            contexts.append(context)
            visits = context.state.get("visits", torch.tensor(0))
            context.state["visits"] = visits + 1
            return super().apply(update, context)

    num_clients = 3
    extra_numbers = 7
    seed = 9
    loop = FederatedLoop(uploads=[CountsVisits(numbers=extra_numbers)], seed=seed)

    fit(loop, tmp_path, rounds=2)

    contexts_of_round_1 = contexts[num_clients:]
    for client, context in enumerate(contexts_of_round_1):
        assert context.client == client
        assert context.round_index == 1
        assert context.seed == seed
        assert context.num_clients == num_clients
    for context in contexts:
        assert context.start_sent
        assert context.num_parameters == loop.space.num_parameters
    assert loop.channel.numbers([0], "up").item() == loop.space.size + extra_numbers

    visits = [state["visits"].item() for state in client_tensors(loop).values()]
    assert visits == [2, 2, 2]


def test_global_model_is_also_sent_to_clients_with_own_starts_if_uploads_refer_to_it(tmp_path):
    uploads = [HalvesAndRecords("global")]
    loop = FederatedLoop(personalizer=FedAMP(), uploads=uploads, seed=0)
    numbers_received_by_round = []

    def record(trainer, module):
        numbers_received = loop.channel.numbers(range(3), "down")
        numbers_received_by_round.append(numbers_received.tolist())

    fit(
        loop,
        tmp_path,
        rounds=2,
        callbacks=[LambdaCallback(on_train_epoch_end=record)],
    )

    size = loop.state.model().numel()
    in_first_round, in_second_round = numbers_received_by_round
    assert in_first_round == [size] * 3
    # From now on each client starts from a model of its own, and gets the global one besides.
    assert in_second_round == [2 * size] * 3


# ---- Compression beyond tests/replay: what is kept, chance, what it costs, buffers


SEED = 4


# ---- error feedback


def make_context(
    client=0,
    entries=40,
    state=None,
    **kwargs,
):
    facts = {"round_index": 0, "state": {} if state is None else state, **kwargs}
    return UploadContext(client, num_clients=3, num_parameters=entries, **facts)


SEEDED = make_generator()
UPDATES = torch.randn(30, 40, generator=SEEDED)


def test_compressed_updates_plus_the_kept_error_sum_to_all_updates():
    state = {}
    sent = torch.zeros(40)
    for round_index, update in enumerate(UPDATES):
        original = update.clone()
        with_buffers = torch.cat([update, update])

        compressed = TopK(0.1).apply(
            with_buffers,
            make_context(state=state, round_index=round_index),
        )

        assert torch.equal(update, original)
        assert torch.equal(compressed[40:], original)  # buffers
        sent += compressed[:40]

    total = sent + state["upload.0.error"]
    torch.testing.assert_close(
        total,
        UPDATES.sum(0),
        rtol=1e-5,
        atol=1e-5,
    )


def test_two_compressions_keep_their_errors_apart():
    state = {}

    compressed = TopK(0.5).apply(UPDATES[0], make_context(state=state))
    TopK(0.1).apply(compressed, make_context(state=state, position=1))

    assert set(state) == {"upload.0.error", "upload.1.error"}


def test_client_left_out_of_a_round_keeps_its_compression_error(tmp_path):
    two_rounds = FederatedLoop(uploads=[TopK(0.05)], seed=SEED)
    fit(two_rounds, tmp_path, rounds=2)

    three_rounds = FederatedLoop(uploads=[TopK(0.05)], seed=SEED)
    with warns("client 1 returned a model"):
        module = fit(
            three_rounds,
            tmp_path,
            Diverges(network(), sgd, {(2, 1)}),
            rounds=3,
        )

    # Client 1 took no part in the third round, client 0 did.
    states = client_tensors(three_rounds)
    earlier_states = client_tensors(two_rounds)

    assert torch.equal(states[1]["upload.0.error"], earlier_states[1]["upload.0.error"])
    assert not torch.equal(states[0]["upload.0.error"], earlier_states[0]["upload.0.error"])
    for value in module.state_dict().values():
        assert value.isfinite().all()


# ---- what crosses


def test_compressed_traffic_counts_indices_and_values():
    num_parameters = 100
    num_buffers = 10
    num_numbers = num_parameters + num_buffers
    num_sent = 5  # of the parameters: 0.05 * 100
    index_bytes = 4
    float_bytes = 4
    double_bytes = 8
    whole = Traffic(numbers=num_numbers, bytes=4.0 * num_numbers)
    sent = torch.zeros(num_numbers)
    upload_context = make_context(entries=num_parameters)

    single = TopK(0.05).traffic(whole, sent, upload_context)
    double = TopK(0.05).traffic(whole, sent.double(), upload_context)

    # The parameters that are sent with their indices, and the buffers whole.
    numbers = 2 * num_sent + num_buffers
    bytes_of_indices = num_sent * index_bytes
    num_values = num_sent + num_buffers
    assert single == Traffic(numbers, bytes=bytes_of_indices + float_bytes * num_values)
    assert double == Traffic(numbers, bytes=bytes_of_indices + double_bytes * num_values)


# ---- what cannot be done


def test_compression_with_clients_own_start_models_is_refused(tmp_path):
    loop = FederatedLoop(personalizer=Standalone(), uploads=[TopK()], seed=SEED)
    with warns("discarded"), refused("did not send"):
        fit(loop, tmp_path)
