"""The inventory file: what it means, and each mistake with its message."""

from __future__ import annotations

import pytest

from hvdtrain.config import inventory, yaml_file
from hvdtrain.config.inventory import InventoryDevice, InventoryHost, InventoryLinks
from hvdtrain.core.errors import UserError

WHOLE = """
currency: EUR
hosts:
- {name: a.cluster, devices: "2 x A100-40GB + 2 x RTX 3090", price_per_hour: 8.5, power_w: 300, mtbf_hours: 500}
- {name: "spot*", devices: mine, count: 3}
links: {between_hosts_gbit: 25, within_host_GBps: 64}
devices:
  mine: {memory_gb: 24, flops: {bf16: 312e12}, bandwidth_GBps: 900, power_w: 350}
"""


def test_a_file_with_every_key(tmp_path):
    path = tmp_path / "inventory.yaml"
    path.write_text(WHOLE)
    found = inventory.read(str(path))
    first, spot = found.hosts
    assert first == InventoryHost("a.cluster", ((2, "A100-40GB"), (2, "RTX 3090")), 8.5, 300, 1, 500)
    assert first.ranks == 4
    assert spot == InventoryHost("spot*", ((1, "mine"),), count=3)
    assert found.links == InventoryLinks(25, 64) and found.currency == "EUR"
    assert found.devices == {"mine": InventoryDevice("mine", 24, {"bf16": 312e12}, 900, 350)}
    assert found.host_of("a") == found.host_of("A.cluster") == first and found.host_of("a.other") is None
    assert found.host_of("spot-17.cluster") == spot and found.price_of("a") == 8.5
    for node, words in (("spot1", "no price of host 'spot"), ("b", "no host 'b'")):
        with pytest.raises(UserError, match=words):
            found.price_of(node)
    with pytest.raises(UserError, match="correct --inventory|Correct --inventory"):
        inventory.read(str(tmp_path / "absent.yaml"))


@pytest.mark.parametrize("text, words", [
    ("hosts: []", "hosts is"), ("hosts: [{name: a}]", "host 1: devices is empty"),
    ("hosts: [{devices: CPU}]", "host 1: name is"), ("hosts: [{name: a, devices: 0 x CPU}]", "devices is '0 x CPU'"),
    ("hosts: [{name: a, devices: 2}]", "devices is 2"), ("hosts: [3]", "host 1: it is 3"),
    ("hosts: [{name: a, devices: CPU, prize: 1}]", "key 'prize'"), ("host: 1", "key 'host'"),
    ("hosts: [{name: a, devices: CPU, price_per_hour: -1}]", "price_per_hour is -1"),
    ("hosts: [{name: a, devices: CPU, price_per_hour: }]", "price_per_hour is empty"),
    ("hosts: [{name: a, devices: CPU, price_per_hour: .nan}]", "price_per_hour is nan"),
    ("hosts: [{name: a, devices: CPU, price_per_hour: true}]", "price_per_hour is true"),
    ("hosts: [{name: a, devices: CPU}, {name: A, devices: CPU}]", "host 'a' twice"),
    ("hosts: [{name: a, devices: CPU, count: 0}]", "count is 0"),
    ("hosts: [{name: a, devices: CPU, mtbf_hours: 0}]", "mtbf_hours is 0"),
    ("hosts: [{name: a, devices: 60000 x CPU, count: 2}]", "over 65,536 devices"),
    ("{hosts: [{name: a, devices: CPU}], links: {between_hosts_gbit: 0}}", "between_hosts_gbit is 0"),
    ("{hosts: [{name: a, devices: CPU}], devices: {x: {flops: {int3: 1}}}}", "key 'int3'"),
    ("{hosts: [{name: a, devices: CPU}], currency: 3}", "currency is 3")])
def test_mistakes_have_a_message(text, words):
    with pytest.raises(UserError, match=words):
        inventory.parse(yaml_file.load(text, "x"), "x.yaml")
