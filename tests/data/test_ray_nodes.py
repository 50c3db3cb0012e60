from typing import Any

from rollart.data.ray_nodes import NodeNames, bundle_of, node_info, shortage
from rollart.types import Binding, NodeInfo

HOME = "10.0.0.1"


def node(ident: str, name: str = "10.0.0.1", alive: bool = True, labels: Any = None, **resources: float) -> Any:
    return {
        "NodeID": ident * 8,
        "NodeName": name,
        "NodeManagerAddress": HOME,
        "Alive": alive,
        "Resources": {"memory": 1e9, "object_store_memory": 1e8, "node:10.0.0.1": 1.0, **resources},
        "Labels": labels or {},
    }


def binding(device_class: str, *devices: int, device: str = "cpu", share: int = 1) -> Binding:
    return Binding("run/w", "actor_gen", "pool", device_class, "n", devices, device_class, device, share)


def test_nodes_that_share_a_name_are_told_apart_and_keep_their_names() -> None:
    names = NodeNames()
    head = node("a", **{"node:__internal_head__": 1.0})
    assert list(names.of([node("b"), head, node("c", "big"), node("d", alive=False)])) == [
        "10.0.0.1-aaaaaaaa",
        "10.0.0.1-bbbbbbbb",
        "big",
    ]
    assert list(names.of([node("b"), node("c", "big"), node("e", "big")])) == [
        "10.0.0.1-bbbbbbbb",
        "big",
        "big-eeeeeeee",
    ]
    assert list(NodeNames().of([node("b")])) == ["10.0.0.1"]


def test_a_node_that_comes_back_under_its_old_name_is_another_node() -> None:
    names = NodeNames()
    assert list(names.of([node("a", "big")])) == ["big"]
    assert list(names.of([node("a", "big", alive=False), node("b", "big")])) == ["big-bbbbbbbb"]


def test_the_classes_of_a_node_are_its_gpus_by_model_its_resources_and_its_cores() -> None:
    gpus = {"GPU": 8.0, "accelerator_type:H800": 1.0}
    assert node_info("n", node("a", CPU=4.0, **gpus)) == NodeInfo("n", {"CPU": 4, "H800": 8}, ("H800",), HOME)
    assert node_info("n", node("a", CPU=4.0, H20=2.0)) == NodeInfo("n", {"CPU": 4, "H20": 2}, address=HOME)
    held = {"H20_group_0_12ab": 1.0, "bundle_group_12ab": 1000.0}
    assert node_info("n", node("a", CPU=4.0, **held)) == NodeInfo("n", {"CPU": 4}, address=HOME)


def test_the_label_of_a_node_names_the_class_of_all_its_devices() -> None:
    label = {"rollart.class": "H20"}
    assert node_info("n", node("a", labels=label, CPU=4.0, GPU=2.0)) == NodeInfo(
        "n", {"CPU": 4, "H20": 2}, ("H20",), HOME
    )
    assert node_info("n", node("a", labels=label, CPU=4.0)) == NodeInfo("n", {"H20": 4}, address=HOME)


def test_a_binding_takes_whole_devices_its_part_of_a_shared_one_or_nothing_for_cores() -> None:
    big = node("a", CPU=4.0, GPU=8.0, H20=8.0)
    assert bundle_of(binding("H800", 0, 1, device="cuda"), big) == {"GPU": 2.0}
    assert bundle_of(binding("H800", 0, device="cuda", share=2), big) == {"GPU": 0.5}
    assert bundle_of(binding("H800", 0, 1, 2, device="cuda", share=2), big) == {"GPU": 2.0}
    assert bundle_of(binding("H20", 3, 4), big) == {"H20": 2.0}
    assert bundle_of(binding("CPU", 0, share=64), big) == {}


def test_what_a_node_could_never_give_is_told() -> None:
    here = node("a", CPU=4.0, H20=4.0)
    assert shortage({"GPU": 1.0, "H20": 1.0}, here) == "0 GPU, not 1"
    assert shortage({"H20": 5.0}, here) == "4 H20, not 5"
    assert shortage({"H20": 4.0}, here) == shortage({}, here) == ""
