"""plain.py with noise on the sum, at the server."""

from net import Net
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.recipe import SimEnv

from fedveil.deploy.nvflare import NoisyAggregator

SITES, ROUNDS = 2, 3


def main() -> None:
    recipe = FedAvgRecipe(
        name="hello-pt",
        min_clients=SITES,
        num_rounds=ROUNDS,
        model=Net(),
        train_script="client.py",
        aggregator=NoisyAggregator(1.0, 8.0, 1e-3, ROUNDS, SITES, out="~/nvflare-run"),
    )
    run = recipe.execute(SimEnv(num_clients=SITES))
    print("result:", run.get_result())


if __name__ == "__main__":
    main()
