"""Words, names and places that conversations are about; simple ones, lists that are split."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text.split()))


NOUNS = _words("""
apple pear plum cherry lemon orange banana melon grape peach fig olive onion carrot potato tomato
pepper bean pea corn rice bread butter cheese egg milk honey sugar salt soup cake pie tea coffee
juice water bottle cup plate bowl spoon fork knife pan pot oven chair desk lamp bed shelf
door window wall floor roof garden gate fence road bridge river lake sea beach island hill
mountain valley forest tree leaf flower rose grass seed stone rock sand snow ice rain wind cloud
storm sun moon star planet fire smoke ash light shadow winter summer
spring autumn horse cow goat sheep pig dog cat mouse rabbit fox wolf bear deer lion tiger monkey
bird eagle owl crow duck goose swan hen fish whale shark crab frog snake turtle bee ant spider
shirt coat hat shoe sock glove scarf belt ring watch bag basket bucket rope chain nail hammer
saw drill ladder wheel cart bicycle car bus train boat ship plane ticket stamp paper
pencil pen brush paint picture story song drum flute piano violin guitar bell clock mirror
candle lock coin wallet camera radio screen cable battery engine motor pump valve
spring switch button lever magnet laser server router printer keyboard folder packet socket
queue stack buffer kernel parser token vector matrix tensor planet rocket harbor
castle tower temple market school museum station factory office kitchen cellar attic
""")
NAMES = _words("""
Anna Ben Carla David Emma Felix Greta Hugo Ida Jonas Karin Leo Maria Nils Olga Paul Quinn Rosa
Simon Tina Uwe Vera Walter Xenia Yusuf Zoe Alice Bob Chen Diego Elena Farid Grace Hana Ivan Julia
Kofi Lena Marco Nora Omar Priya Rafael Sara Tom Uma Victor Wanda Yara Zack Amir Bella Cyril Dora
Eric Fatima George Helen Igor Jane Kevin Laura Martin Nina Oscar Petra Robin Theo Ursula
Vlad Wendy Yoko Aaron Bruno Clara Daniel Eva Frank Gina Henry Iris Jack Kate Lucas Mona Noah
Peter Ruth Sam Tara Viola Adele Boris Celia Dylan Edith Fiona Gavin Holly Ian Joan Karl Lydia
""")
CITIES = _words("""
Berlin Paris London Madrid Rome Vienna Prague Warsaw Oslo Stockholm Helsinki Copenhagen Dublin
Lisbon Athens Budapest Zurich Geneva Hamburg Munich Cologne Lyon Turin Milan Naples Porto Seville
Tokyo Osaka Kyoto Seoul Beijing Shanghai Delhi Mumbai Bangkok Jakarta Manila Hanoi Sydney Perth
Cairo Lagos Nairobi Tunis Dakar Accra Boston Chicago Denver Dallas Seattle Toronto Montreal Lima
Quito Bogota Santiago Havana Reykjavik Tallinn Riga Vilnius Minsk Kyiv Sofia Belgrade Zagreb
""")
COLOURS = ["red", "blue", "green", "yellow", "black", "white", "brown", "pink", "grey", "purple"]
SKIES = ["sunny", "cloudy", "rainy", "windy", "foggy", "snowy", "stormy", "clear"]
LANGUAGES = ["German", "French", "Spanish", "Italian", "Polish", "Greek", "Turkish", "Dutch"]
WEEKDAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = [
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
]
