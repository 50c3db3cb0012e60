"""Where the workers of a config go, and what is refused before anything starts."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from rollart.config import parse
from rollart.errors import ConfigError
from rollart.resource.placement import Placement, place
from rollart.types import NodeInfo

LAPTOP = [NodeInfo("localhost", {"CPU": 2})]
CLUSTER = [
    NodeInfo("head", {"CPU": 16}),
    NodeInfo("a", {"CPU": 8, "H800": 8}, ("H800",)),
    NodeInfo("b", {"CPU": 8, "H20": 8}, ("H20",)),
    NodeInfo("c", {"CPU": 8, "H20": 8}, ("H20",)),
]


def placed(text: str = "", nodes: list[NodeInfo] | None = None) -> Placement:
    return place(parse(f"{text}\n[tasks.frozenlake]\n"), nodes or CLUSTER)


def classes(placement: Placement) -> dict[str, str]:
    return {each.worker: each.device_class for each in placement.wanted}


def test_a_laptop_without_a_word_about_pools_runs_everything_on_its_cores() -> None:
    placement = placed(nodes=LAPTOP)
    assert set(classes(placement).values()) == {"CPU"}
    assert [(pool.name, pool.nodes, pool.device) for pool in placement.pools] == [("CPU", {"localhost": (0, 1)}, "cpu")]


def test_roles_find_their_default_classes_among_what_a_cluster_has() -> None:
    assert classes(placed()) == {
        "training-0": "H800",
        "inference-0": "H20",
        "environment-0": "CPU",
        "reward-0": "CPU",
    }


def test_a_lone_accelerator_is_shared_by_engine_and_trainer() -> None:
    placement = placed(nodes=[NodeInfo("localhost", {"CPU": 8, "H200": 1}, ("H200",))])
    assert [pool.share for pool in placement.pools if pool.name == "H200"] == [2]
    with pytest.raises(
        ConfigError, match=r"roles\.actor_gen: worker inference-1: no node has 1 device of class 'H200' free"
    ):
        placed("roles.actor_gen.workers = 2", nodes=[NodeInfo("localhost", {"CPU": 8, "H200": 1}, ("H200",))])


def test_affinity_puts_a_worker_on_each_class_it_names() -> None:
    placement = placed("affinity = { frozenlake = 'H800', default = 'H20' }")
    assert [each.device_class for each in placement.of_role("actor_gen")] == ["H800", "H20"]
    assert placement.affinity == {"frozenlake": "H800", "default": "H20"}


def test_auto_affinity_puts_a_worker_on_each_accelerator_class() -> None:
    assert [each.device_class for each in placed("affinity = 'auto'").of_role("actor_gen")] == ["H800", "H20"]


def test_numbers_per_class_and_a_plain_number_of_workers() -> None:
    by_class = placed("roles.actor_gen.workers = { H800 = 2, H20 = 3 }").of_role("actor_gen")
    assert [each.device_class for each in by_class] == ["H800"] * 2 + ["H20"] * 3
    wide = placed("roles.actor_gen = { workers = 4, devices = 4 }").of_role("actor_gen")
    assert [(each.worker, each.device_class, each.num_devices) for each in wide] == [
        (f"inference-{number}", "H20", 4) for number in range(4)
    ]
    assert len(placed().of_role("environment")) == 1
    assert len(placed("roles.environment.workers = 5").of_role("environment")) == 5


def test_a_table_for_prefill_puts_workers_that_read_beside_those_that_decode() -> None:
    def on(role: str, *words: str) -> list[tuple[str, str]]:
        return [(each.worker, each.device_class) for each in placed("\n".join(words)).of_role(role)]

    assert on("prefill") == []
    assert on("prefill", "roles.prefill = {}") == [("prefill-0", "H800")]
    assert on("actor_gen", "roles.prefill = {}") == [("inference-0", "H20")]
    apart = "roles.prefill.workers = { H800 = 1, H20 = 2 }", "roles.actor_gen.workers = { H20 = 3 }"
    assert on("prefill", *apart) == [("prefill-0", "H800"), ("prefill-1", "H20"), ("prefill-2", "H20")]
    assert on("actor_gen", *apart) == [(f"inference-{n}", "H20") for n in range(3)]


def test_an_engine_that_cannot_hand_over_has_no_workers_that_only_read() -> None:
    config = parse("roles.prefill = {}\n[tasks.frozenlake]\n")
    with pytest.raises(ConfigError, match=r"roles\.prefill: engine 'other' cannot hand KV from one worker to another"):
        place(replace(config, engine="other"), CLUSTER)


def test_vllm_hands_over_only_between_workers_alike() -> None:
    apart = 'engine = "vllm"\n[roles.prefill]\n'
    assert [each.worker for each in placed(apart).of_role("prefill")] == ["prefill-0"]
    for text, message in (
        ("devices = 2", r"roles\.prefill\.devices: .* take as many as in roles\.actor_gen\.devices"),
        ('device_class = "CPU"', r"roles\.prefill\.device_class: vLLM's KV on cpu and on cuda differs"),
        ("[engine_options]\nenable_prefix_caching = false", r"engine_options\.enable_prefix_caching: false, but"),
    ):
        with pytest.raises(ConfigError, match=message):
            placed(f"{apart}{text}\n")


def test_each_server_of_others_has_an_inference_worker() -> None:
    text = "engine = 'http'\nengine_options.kind = 'vllm'\nengine_options.urls = ['http://a:1', 'http://b:1', 'http://c:1']\n"
    assert [each.worker for each in placed(text).of_role("actor_gen")] == ["inference-0", "inference-1", "inference-2"]
    with pytest.raises(ConfigError, match=r"workers: 2, but engine_options\.urls names 3 servers; each has one"):
        placed(f"{text}roles.actor_gen.workers = 2")


def test_the_ranks_of_a_trainer_are_workers_with_a_device_each() -> None:
    ranks = placed("trainer = 'fsdp2'\nroles.actor_train.workers = 3").of_role("actor_train")
    assert [(each.worker, each.device_class, each.num_devices) for each in ranks] == [
        (f"training-{number}", "H800", 1) for number in range(3)
    ]


def test_declared_pools_take_their_devices_from_the_nodes_and_the_cores_come_by_themselves() -> None:
    pools = {
        pool.name: pool
        for pool in placed(
            "pools.train = { device_class = 'H800', count = 4, cost = 2.85, compatible = ['H20'] }\n"
            "pools.wide = { device_class = 'H20', nodes = { c = '0-3,6' } }"
        ).pools
    }
    assert pools["train"].nodes == {"a": (0, 1, 2, 3)}
    assert pools["wide"].nodes == {"c": (0, 1, 2, 3, 6)}
    assert pools["CPU"].nodes["head"] == tuple(range(16))
    assert (pools["train"].device, pools["CPU"].device) == ("cuda", "cpu")


def test_a_class_can_be_emulated_on_cpu() -> None:
    placement = placed("pools.H20 = { count = 3, device = 'cpu' }", nodes=LAPTOP)
    assert classes(placement)["inference-0"] == "H20"
    assert placement.pools[0].nodes == {"localhost": (0, 1, 2)}


@pytest.mark.parametrize("where", ["ids = '0-1'", "nodes = { localhost = '0-1' }", "count = 2"])
def test_devices_of_a_machine_without_accelerators_must_say_that_they_are_emulated(where: str) -> None:
    with pytest.raises(ConfigError, match=r'pools.XPU: no node has a device of class .*set pools.XPU.device = "cpu"'):
        placed(f"pools.XPU = {{ {where} }}", nodes=LAPTOP)
    assert placed(f"pools.XPU = {{ {where}, device = 'cpu' }}", nodes=LAPTOP).pools[0].nodes == {"localhost": (0, 1)}


@pytest.mark.parametrize("more", ["", "count = 2", "ids = '0-1'", "nodes = { head = '0-1' }"])
def test_what_a_node_only_calls_a_class_is_no_gpu(more: str) -> None:
    """A resource of a Ray cluster, which may be anything."""
    head = [NodeInfo("head", {"CPU": 8, "H800": 1, "H20": 4})]
    line = r"pools.H20: no node has a GPU of class 'H20' \(head: 8 CPU, 1 H800, 4 H20, no GPU\); .*H20.device = \"cpu\""
    with pytest.raises(ConfigError, match=line):
        placed(f"[pools.H20]\n{more}", head)
    emulated = placed(f"[pools.H20]\n{more}\ndevice = 'cpu'", head).pools[0]
    assert (emulated.device, emulated.nodes["head"][0]) == ("cpu", 0)


def test_two_pools_of_a_class_share_out_its_devices() -> None:
    pools = placed("pools.first = { device_class = 'H20', count = 2 }\npools.rest = { device_class = 'H20' }").pools
    devices = [(node, index) for pool in pools[:2] for node, ids in pool.nodes.items() for index in ids]
    assert len(set(devices)) == len(devices) > 2
    emulated = "pools.a = { device_class = 'H20', count = 2, device = 'cpu' }\n" + (
        "pools.b = { device_class = 'H20', count = 3, device = 'cpu' }"
    )
    assert [pool.nodes for pool in placed(emulated, nodes=LAPTOP).pools[:2]] == [
        {"localhost": (0, 1)},
        {"localhost": (2, 3, 4)},
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "pools.a = { device_class = 'H20', nodes = { c = '0-3' } }\n"
            "pools.b = { device_class = 'H20', nodes = { c = '2-5' } }",
            "pools.b: H20:2 of c is in pools.a already; keep it in one pool",
        ),
        ("pools.H20 = { nodes = { c = '6,90' } }", "pools.H20: c has 8 such devices, 0 to 7, no 90"),
        (
            "pools.all = { device_class = 'H20' }\npools.more = { device_class = 'H20', count = 1 }",
            "pools.more.count: 1 devices of class 'H20', but the nodes have 0 that no other pool has",
        ),
    ],
)
def test_a_device_is_in_one_pool_and_must_be_there(text: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        placed(text)
    assert line in str(caught.value)


def test_a_serverless_pool_is_a_number_of_calls_at_a_url() -> None:
    (pool, *_) = placed("pools.fn = { url = 'https://f.example/x', count = 8 }").pools
    assert (pool.device_class, pool.nodes) == ("serverless", {"serverless": tuple(range(8))})
    assert classes(placed("pools.fn = { url = 'https://f.example/x', count = 8 }"))["inference-0"] == "CPU"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("roles.actor_gem.workers = 1", "roles.actor_gem: not a role; did you mean 'actor_gen'?"),
        ("roles.actor_gen.device_class = 'H2'", "roles.actor_gen.device_class: no pool has class 'H2'; did"),
        ("roles.actor_gen.workers = { H30 = 1 }", "device class 'H30': no pool has it; did you mean 'H800'|'H20'"),
        ("roles.actor_gen.workers = {}", "roles.actor_gen.workers: none at all; give a class a number, such as {"),
        ("roles.environment.workers = {}", "roles.environment.workers: none at all; give a class a number"),
        ("roles.prefill.workers = {}", "roles.prefill.workers: none at all"),
        ("roles.actor_gen.workers = 17", "inference-16: no node has 1 device of class 'H20' free"),
        ("roles.actor_gen.devices = 9", "no node has 9 devices of class 'H20' free"),
        ("roles.actor_train.workers = 2", "roles.actor_train.workers: 2, but the embedded trainer is one process"),
        ("affinity = { frozenlak = 'H20' }", "affinity.frozenlak: no task has this name or tag; did"),
        ("affinity = { frozenlake = 'H200' }", "device class 'H200': no pool has it; did you mean 'H20'"),
        (
            "affinity = { frozenlake = 'H800' }\nroles.actor_gen.device_class = 'H20'",
            "affinity.frozenlake: no worker of actor_gen is on class 'H800' or one compatible with it",
        ),
        ("pools.H800 = { count = 9 }", "pools.H800.count: 9 devices of class 'H800', but the nodes have 8"),
        ("pools.A100 = { count = 1 }", "pools.A100: no node has a device of class 'A100'"),
        ("pools.H20 = { count = 1, ids = '0' }", "pools.H20: count and ids both say which devices; keep one"),
        ("pools.H20 = { ids = '3-1' }", "pools.H20.ids: '3-1' are not indices"),
        ("pools.H20 = { ids = '1,1' }", "names a device twice"),
        ("pools.H20 = { nodes = { d = '0' } }", "pools.H20.nodes: no node 'd'; "),
        ("pools.fn = { url = 'https://f.example' }", "pools.fn.count: a serverless pool says how many"),
    ],
)  # fmt: skip
def test_a_mistake_is_refused_before_anything_starts(text: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        placed(text)
    assert any(part in str(caught.value) for part in line.split("|")), str(caught.value)
