from flsv.models import MLP


def test_mlp_is_mcmahans_2nn(check_network):
    check_network(MLP(), 10, (1, 28, 28), 199_210)  # "199,210 total parameters"
