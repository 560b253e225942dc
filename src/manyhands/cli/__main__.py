from manyhands.cli import main

main()
