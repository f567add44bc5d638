"""Learn what comes next in Shakespeare's plays, without learning what any one of his roles says: python next_character.py"""

from plays import ALPHABET, sequences
from torch import nn

import fedveil as fv


class LastFive(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(len(ALPHABET), 16)
        self.window = nn.Sequential(nn.ConstantPad1d((4, 0), 0.0), nn.Conv1d(16, 64, 5), nn.Tanh())
        self.head = nn.Linear(64, len(ALPHABET))

    def forward(self, x):  # [n, 64] tokens -> [n, 64, alphabet]
        return self.head(self.window(self.embedding(x).mT).mT)


def load():
    x, y, role = sequences()
    return fv.from_arrays(x, y, client=role, name="shakespeare", vocabulary=len(ALPHABET), classes=len(ALPHABET))


def train(data, epsilon=8.0, seed=0, rounds=20, clients=200, out=None):
    config = fv.configure(
        model=LastFive,
        task="token-prediction",
        method=fv.DPFedAvg(clip=0.5),
        training={"rounds": rounds, "clients_per_round": clients, "local_steps": 4, "batch_size": 16, "evaluate_every": rounds}
        | {"optimizer": {"lr": 2.0}, "server_optimizer": {"lr": 4.0}},
        privacy={"epsilon": epsilon, "delta": 5e-4} if epsilon else {"noise_multiplier": 0.0},
        run={"seed": seed},
    )
    return fv.train(config, out, data=data)


if __name__ == "__main__":
    result = train(load())
    print(f"{result.history[-1]['test_bits']:.2f} bits a character; see {result.path}")
