"""Training at a site, after NVFlare's hello-pt; the data are made up."""

import zlib

import nvflare.client as flare
import torch
from net import Net


def made_up(site: str):
    generator = torch.Generator().manual_seed(zlib.crc32(site.encode()))
    x = torch.randn(500, 20, generator=generator)
    return x, (x[:, :10].sum(1) > 0).long()


def main() -> None:
    flare.init()
    net, loss = Net(), torch.nn.CrossEntropyLoss()
    x, y = made_up(flare.get_site_name())
    while flare.is_running():
        model = flare.receive()
        net.load_state_dict(model.params)
        accuracy = float((net(x).argmax(1) == y).float().mean())
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        for _ in range(20):
            optimizer.zero_grad()
            loss(net(x), y).backward()
            optimizer.step()
        flare.send(flare.FLModel(params=net.state_dict(), metrics={"accuracy": accuracy}, meta={"NUM_STEPS_CURRENT_ROUND": 20}))


if __name__ == "__main__":
    main()
