"""What is wrong between nodes, and between the GPUs of one."""

from __future__ import annotations

from collections.abc import Iterator

from app.doctor.facts import ClusterFacts, Finding, LinkFacts, RingFacts
from app.doctor.rings import card_of


def across(facts: ClusterFacts) -> list[LinkFacts]:
    return [link for link in facts.links if link.gpus is None]


def cut(facts: ClusterFacts) -> Iterator[Finding]:
    """Pairs between which nothing comes through: one sentence per node where it is cut off from all, else per pair."""
    dead = [link for link in across(facts) if link.rate is None]
    answered = [node.node_id for node in facts.answered]
    alone = [
        node
        for node in answered
        if len(answered) > 2 and {link.source for link in dead if link.target == node} >= set(answered) - {node}
    ]
    for node_id in alone:
        node = facts.node(node_id)
        problem = next(link.problem for link in dead if link.target == node_id)
        yield _no_way(f"no other node reaches {node.who}", problem, (node_id,))
    pairs: dict[frozenset[str], LinkFacts] = {}
    for link in dead:
        if link.target not in alone and link.source not in alone:
            pairs.setdefault(frozenset((link.source, link.target)), link)
    for link in pairs.values():
        source, target = facts.node(link.source), facts.node(link.target)
        yield _no_way(f"{source.who} does not reach {target.who}", link.problem, (link.target,))


def _no_way(said: str, problem: str, nodes: tuple[str, ...]) -> Finding:
    if "refused" in problem:
        mend = "a firewall answers for it: open all TCP ports between the nodes (gloo and NCCL choose theirs)"
        return Finding("closed_port", f"{said}: the port is closed", mend, nodes)
    mend = "look at its cable, its route and the firewall: all TCP ports must be open between the nodes"
    return Finding("cut_link", f"{said}: {problem or 'nothing comes through'}", mend, nodes)


def slow_link(facts: ClusterFacts) -> Iterator[Finding]:
    """Below a third of what the file or the slower card promises: one TCP stream seldom fills a link, three would."""
    for link in across(facts):
        if link.rate is None:
            continue
        source, target = facts.node(link.source), facts.node(link.target)
        promised = [rate for node in (source, target) if (rate := card_of(node))]
        if facts.link_expected:
            promised.append(min(facts.link_expected, 5e9))  # one stream does no more on any card
        # A single stream is bounded by a core: beyond 25 Gbit/s nothing is concluded.
        expected = min([*promised, 3e9]) if promised else 0.0
        if expected and link.rate < expected / 3:
            yield Finding(
                "slow_link",
                f"from {source.who} to {target.who} {link.rate * 8 / 1e9:.2g} Gbit/s come through, where "
                f"{expected * 8 / 1e9:.2g} should",
                "look for a slow cable, port or other traffic (`iperf3`), and for the wrong network interface",
                (link.target,),
                grave=False,
            )


def slow_peer_link(facts: ClusterFacts) -> Iterator[Finding]:
    """Within a node: a GPU pair far below its peers has lost its NVLink and goes over PCIe or the host."""
    for node in facts.answered:
        mine = [link for link in facts.links if link.gpus and link.source == node.node_id and link.rate]
        if len(mine) < 2:
            continue
        usual = sorted(link.rate or 0.0 for link in mine)[len(mine) // 2]
        for link in mine:
            if (link.rate or 0.0) < 0.5 * usual and link.gpus:
                yield Finding(
                    "slow_gpu_link",
                    f"GPU {link.gpus[0]} to {link.gpus[1]} of {node.who} copies {(link.rate or 0) / 1e9:.0f} GB/s, "
                    f"other pairs there {usual / 1e9:.0f}",
                    "look at `nvidia-smi nvlink --status` and `nvidia-smi topo -m` there",
                    (node.node_id,),
                )


def wrong_interface(facts: ClusterFacts) -> Iterator[Finding]:
    for node in facts.answered:
        for variable, asked in node.asked_interfaces.items():
            wanted = [name for name in asked.removeprefix("=").split(",") if name]
            if not wanted or asked.startswith("^"):
                continue
            exact = asked.startswith("=") or variable.startswith("GLOO")
            found = [
                name for name in node.interfaces if any(name == w if exact else name.startswith(w) for w in wanted)
            ]
            if not found:
                has = ", ".join(sorted(set(node.interfaces) - {"lo"})) or "none"
                yield Finding(
                    "no_interface",
                    f"{variable}={asked} on {node.who} names no network interface that is up there (it has {has})",
                    f"set {variable} to the one whose address is {node.address}",
                    (node.node_id,),
                )
            elif len(facts.nodes) > 1 and all(node.interfaces[name].startswith("127.") for name in found):
                yield Finding(
                    "loopback",
                    f"{variable}={asked} on {node.who} is the loopback, where other nodes cannot come",
                    f"set {variable} to the one whose address is {node.address}",
                    (node.node_id,),
                )


def host_name(facts: ClusterFacts) -> Iterator[Finding]:
    """gloo gives its peers the address that the host's own name resolves to, unless an interface is named."""
    if len(facts.nodes) < 2:
        return
    for node in facts.answered:
        named = node.asked_interfaces.get("GLOO_SOCKET_IFNAME")
        if node.resolves_to is None or (node.resolves_to.startswith("127.") and not named):
            has = f"resolves to {node.resolves_to}" if node.resolves_to else "does not resolve"
            yield Finding(
                "host_name",
                f"the name {node.host} of {node.address} {has} there, where its peers cannot come",
                f"write `{node.address} {node.host}` into its /etc/hosts, or set GLOO_SOCKET_IFNAME",
                (node.node_id,),
            )


def slow_all_reduce(facts: ClusterFacts) -> Iterator[Finding]:
    """What training waits for. Below half of what the hardware gives, NCCL has not found its links."""
    everywhere = max((len(ring.nodes) for ring in facts.rings), default=0)
    pairs = [ring for ring in facts.rings if 1 < len(ring.nodes) < everywhere]
    blamed = list(_slow_pairs(facts, pairs))
    for ring in facts.rings:
        whole = len(ring.nodes) == everywhere > 1
        who = f"over {ring.ranks} workers on {len(ring.nodes)} nodes" if whole else f"within {_who(facts, ring)}"
        if ring.problem:
            mend = "run with NCCL_DEBUG=INFO: it says which connection fails"
            yield Finding("all_reduce", f"all-reduce {who} does not work: {ring.problem}", mend, grave=False)
        elif ring.low and ring not in pairs and not (whole and blamed):
            yield Finding(
                "slow_all_reduce",
                f"all-reduce {who} moves {_gigabytes(ring.rate)}, where the hardware gives {_gigabytes(ring.expected)}",
                "NCCL may have taken the wrong interface, or found no EFA, InfiniBand or NVLink: NCCL_DEBUG=INFO says"
                if ring.backend == "nccl"
                else "look at what else uses the network, and at GLOO_SOCKET_IFNAME",
                () if whole else ring.nodes,
                grave=False,
            )
    yield from blamed


def _slow_pairs(facts: ClusterFacts, pairs: list[RingFacts]) -> Iterator[Finding]:
    """Pairs below half of the best one; a node that is slow with everybody is named alone."""
    best = max((ring.rate or 0.0 for ring in pairs), default=0.0)
    slow = [ring for ring in pairs if (ring.rate or 0.0) < 0.5 * best]
    members = dict.fromkeys(node for ring in pairs for node in ring.nodes)
    alone = [node for node in members if all(ring in slow for ring in pairs if node in ring.nodes)]
    mend = "look at its cables, its port and its drivers (`ibstat`, `fi_info`), or leave the node out (--exclude-bad)"
    for node in alone:
        rates = [ring.rate or 0.0 for ring in pairs if node in ring.nodes]
        said = f"all-reduce between {facts.node(node).who} and any other node moves at most {_gigabytes(max(rates))}"
        yield Finding("slow_pair", f"{said}, between others {_gigabytes(best)}", mend, (node,))
    for ring in slow:
        if not set(ring.nodes) & set(alone):
            said = f"all-reduce between {_who(facts, ring)} moves {_gigabytes(ring.rate)}"
            yield Finding("slow_pair", f"{said}, between others {_gigabytes(best)}", mend, ring.nodes[1:])


def _who(facts: ClusterFacts, ring: RingFacts) -> str:
    return " and ".join(facts.node(node).who for node in ring.nodes)


def _gigabytes(rate: float | None) -> str:
    return f"{(rate or 0.0) / 1e9:.3g} GB/s"


TABLE = (cut, slow_link, slow_peer_link, slow_all_reduce, wrong_interface, host_name)
