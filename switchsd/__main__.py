from switchsd.cli import main

raise SystemExit(main())
