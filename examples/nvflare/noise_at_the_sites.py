"""plain.py with noise at each site."""

from net import Net
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.recipe import SimEnv

from fedveil.deploy.nvflare import ReleaseFilter

SITES, ROUNDS = 2, 3


def main() -> None:
    recipe = FedAvgRecipe(
        name="hello-pt",
        min_clients=SITES,
        num_rounds=ROUNDS,
        model=Net(),
        train_script="client.py",
    )
    recipe.add_client_output_filter(ReleaseFilter(1.0, 8.0, 1e-3, ROUNDS, SITES, ledger="~/nvflare-ledgers"))
    run = recipe.execute(SimEnv(num_clients=SITES))
    print("result:", run.get_result())


if __name__ == "__main__":
    main()
